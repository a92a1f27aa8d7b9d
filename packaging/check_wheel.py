"""Install a wheel as a user would, with no compiler and no Node, and try what the page promises.

    python packaging/check_wheel.py dist/torchtap-….whl [--torch 2.13.0]

Makes an environment of its own in a temporary folder and removes it. Prints a line for each thing that worked.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Installation:
    """A fresh environment with the wheel in it."""

    def __init__(self, folder: Path, wheel: Path, torch: str) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        # Nothing but the environment itself: neither a compiler nor Node can be found.
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            **{
                name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG"))
            },
        }
        pip = [str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, *constraints, f"torch=={torch}"], check=True)
        subprocess.run([*pip, *constraints, f"{wheel}[view,plot]"], check=True)

    def run(self, *words: str, codes: tuple[int, ...] = (0,), **variables: str) -> str:
        """The output of a command of the environment's."""
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode not in codes:
            sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout


def check_demo(place: Installation) -> None:
    output = place.run("torchtap", "demo", "--steps", "30")
    assert "loss after 30 steps" in output, output


def check_native(place: Installation) -> None:
    program = (
        "from torchtap.reduce import _native; from torchtap.store.format import _checksum; "
        "from torchtap.comparison import _distance; import torchtap; print(torchtap.__file__)"
    )
    where = place.run("python", "-c", program)
    assert str(place.folder) in where, f"not the wheel's own files: {where}"


def check_compare(place: Installation) -> None:
    place.run("torchtap", "compare", "demo-run", "demo-run")


def check_report(place: Installation) -> None:
    place.run("torchtap", "report", "demo-run", "-o", "page.html")
    page = (place.folder / "page.html").read_text()
    assert "<script" in page, "the report has no page in it"
    assert len(page) > 100_000, "the report has no data in it"


def check_view(place: Installation) -> None:
    server = subprocess.Popen(
        [str(place.bin / "torchtap"), "view", "demo-run", "--no-browser"],
        cwd=place.folder,
        env={**place.environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        page = fetch(first_address(server))
        assert b"<script" in page, page[:200]
    finally:
        server.terminate()
        server.wait(20)


def first_address(server: subprocess.Popen[str]) -> str:
    """The address that a server prints when it is up."""
    assert server.stdout is not None
    for line in server.stdout:
        found = re.search(r"http://\S+", line)
        if found:
            return found.group(0).rstrip(".")
    raise AssertionError("the viewer printed no address")


def fetch(address: str) -> bytes:
    """A page of this machine's; the server may need a moment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(50):
        try:
            with opener.open(address, timeout=5) as answer:
                return bytes(answer.read())
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"{address} does not answer")


def check_types(place: Installation) -> None:
    """A typed program of a user's, by pyright, which runs outside of the environment: it needs Node."""
    pyright = shutil.which("pyright")
    if pyright is None or shutil.which("node") is None or not answers([pyright, "--version"]):
        print("types: not looked at, there is no pyright that starts")
        return
    words = [pyright, "--pythonpath", str(place.bin / "python"), str(ROOT / "packaging" / "consumer.py")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=place.folder, check=False)
    assert done.returncode == 0, done.stdout


def answers(words: list[str]) -> bool:
    """Whether a command can be had."""
    return subprocess.run(words, capture_output=True, timeout=300, check=False).returncode == 0


TRAINING = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""


def check_zero_code(place: Installation) -> None:
    """`torchtap run` and `torchtap inject` record a script; nothing is registered in torch."""
    (place.folder / "train.py").write_text(TRAINING)
    assert place.run("torchtap", "run", "--out", "recorded", "--every", "1", "train.py") == "trained\n"
    inject = {
        "PYTHONPATH": place.run("torchtap", "inject").strip(),
        "TORCHTAP": '{"out": "injected", "every": 1}',
    }
    assert place.run("python", "train.py", **inject) == "trained\n"
    for run in ("recorded", "injected"):
        assert "steps 3 " in place.run("torchtap", "show", run), f"{run} was not recorded"
    groups = "from importlib.metadata import entry_points as e; print(len(e(group='torch.backends')))"
    assert place.run("python", "-c", groups) == "0\n", "something is registered in torch"


def check_import_torch(place: Installation) -> None:
    """``import torch`` works in every broken layout of the installed package, whether or not it is to record."""
    package = Path(place.run("python", "-c", "import torchtap; print(torchtap.__path__[0])").strip())
    kept = place.folder / "kept"
    shutil.copytree(package, kept)
    path = place.run("torchtap", "inject").strip()
    for name, damage in LAYOUTS.items():
        damage(package)
        for variables in ({}, {"TORCHTAP": "1"}, {"TORCHTAP": "1", "PYTHONPATH": path}):
            said = place.run("python", "-c", "import torch; print('imported')", **variables)
            assert said == "imported\n", f"{name}: {said}"
        shutil.rmtree(package, ignore_errors=True)
        shutil.copytree(kept, package)
    print(f"import torch: {len(LAYOUTS)} broken layouts, 0 fail")


def _write(name: str, text: str) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        (package / name).write_text(text)

    return damage


def _half_removed(package: Path) -> None:
    for path in sorted(package.rglob("*.py"))[::2]:
        path.unlink()


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "syntax error": _write("__init__.py", "def :"),
    "import error": _write("__init__.py", "import a_module_that_is_not_there"),
    "any error": _write("__init__.py", "raise RuntimeError"),
    "ends the process": _write("__init__.py", "raise SystemExit(3)"),
    "error in an inner file": _write("errors.py", "raise RuntimeError"),
    "half removed": _half_removed,
    "removed, metadata left": shutil.rmtree,
    "starting file broken": _write("integrations/inject/sitecustomize.py", "raise RuntimeError"),
}

CHECKS = (
    check_native,
    check_demo,
    check_compare,
    check_report,
    check_view,
    check_types,
    check_zero_code,
    check_import_torch,
)


def main() -> None:
    """Check the wheel that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="2.13.0")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="torchtap-wheel-"))
    try:
        place = Installation(folder, asked.wheel.resolve(), asked.torch)
        print(f"installed {asked.wheel.name}")
        for check in CHECKS:
            check(place)
            print(f"{check.__name__.removeprefix('check_')}: works")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
