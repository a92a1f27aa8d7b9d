"""Start zero-code recording in a process whose ``PYTHONPATH`` begins with this folder.

``torchtap run`` puts the folder there; ``torchtap inject`` prints it for other launchers. Python imports this file at
its start. Guarantees:
- without ``TORCHTAP`` in the environment, or with 0, false, no or off, it only does the next point;
- the user's own ``sitecustomize`` runs as if this file did not exist, and this folder leaves ``sys.path``;
- recording starts after ``import torch`` is complete, and never while a module of torchtap is half imported;
- no error reaches the program. If torchtap is broken, missing, shadowed or of another version, the training is not
  recorded, and one line on standard error states it.

It imports nothing of torchtap before torch is imported. Programs start older Pythons too, so it uses the syntax of 3.6.
"""

import os
import sys

TYPE_CHECKING = False  # importing typing takes as long as all the rest
if TYPE_CHECKING:
    from typing import Any, Optional

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_FOLDER))


class _Starter:
    """A finder on ``sys.meta_path`` that starts the recording after ``import torch``. The other finders find."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.importing = 0  # modules of torchtap that are half imported
        self.torch_is_complete = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in ("torch", "torchtap") and not name.startswith("torchtap."):
            return None
        try:
            finders: Any = sys.meta_path
            for finder in finders:
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec = find and find(name, path, target)
                if spec is not None:
                    self._follow(name, spec.loader)
                    return spec
        except Exception:
            return None  # Python asks the finders itself next, and reports the error
        return None

    def _follow(self, name: str, loader: "Any") -> None:
        """Try to start when the loader has executed the module. The loader is restored before that."""
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: object) -> None:
            del loader.exec_module
            if name == "torch":
                execute(module)
                self.torch_is_complete = True
                self._try_to_start()
                return
            self.importing += 1
            try:
                execute(module)
            finally:
                self.importing -= 1
                self._try_to_start()

        try:
            if "exec_module" in vars(loader):  # a class, whose own function must not be replaced
                raise AttributeError
            loader.exec_module = exec_module
        except (AttributeError, TypeError):
            if name == "torch":
                _report("torch is imported by a loader that cannot be followed")

    def _try_to_start(self) -> None:
        finders: Any = sys.meta_path
        if self.torch_is_complete and not self.importing and self in finders:
            finders.remove(self)
            _start(self.words)


def _start(words: str) -> None:
    """Start recording in this process, or report in one line why not."""
    try:
        problem = _shadowed()
        if problem is None:
            from torchtap.integrations.zero_code.recording import begin

            begin(words)
            return
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also a SystemExit
        problem = str(error) if type(error).__name__ == "PlanError" else f"{type(error).__name__}: {error}"
    _report(problem)


def _shadowed() -> "Optional[str]":  # noqa: UP045
    """Return why ``import torchtap`` would not import the package of this file, if so. Imports nothing of it."""
    from importlib.util import find_spec

    loaded = sys.modules.get("torchtap")
    spec = getattr(loaded, "__spec__", None) if loaded is not None else find_spec("torchtap")
    if spec is None:
        return f"torchtap cannot be imported by {sys.executable}"
    found = os.path.dirname(spec.origin) if spec.origin else "a folder without an __init__.py"
    if os.path.realpath(found) != os.path.realpath(_PACKAGE):
        return f"{spec.origin or found} stands in front of the torchtap in {_PACKAGE}"
    return None


def _report(problem: str) -> None:
    line = f"torchtap: this training is not recorded: {problem}"
    try:
        sys.stderr.write("".join(c if c.isprintable() else " " for c in line)[:2000] + "\n")
        sys.stderr.flush()
    except Exception:
        pass  # a closed standard error


def _wait_for_torch() -> None:
    words = os.environ.get("TORCHTAP", "")
    if words.lower() in ("", "0", "false", "no", "off"):
        return
    if "torch" in sys.modules:  # a .pth file was faster
        _start(words)
    else:
        finders: Any = sys.meta_path
        finders.insert(0, _Starter(words))


def _run_the_users_own() -> None:
    """Import the ``sitecustomize`` that this file stands in front of. Its errors are Python's to report, as ever."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _FOLDER]
    own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        sys.modules.setdefault("sitecustomize", own)
        if getattr(error, "name", None) != "sitecustomize":
            raise
    except BaseException:
        sys.modules.setdefault("sitecustomize", own)
        raise


if __name__ == "sitecustomize":
    try:
        _wait_for_torch()
    except Exception as _error:
        _report(str(_error))
    _run_the_users_own()
