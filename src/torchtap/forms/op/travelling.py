"""How carriers go along with a model: copies have them, pickles have their names, packages have a file about them.

A pickle that names a class of torchtap would not load where it is not installed, and one that runs code to find out
is refused by scanners. So a pickle has only the names of the sites, as plain text and tuples in one attribute. What is
loaded runs as it did; ``capture`` takes it like any model, and `torchtap.instrument` puts the same sites on again.

A package of ``torch.package`` has a plain file beside the model, which puts them on by itself where torchtap is.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import nn

from torchtap.hooks.conceal import Traveller

__all__ = ["NAMES", "CopiedAlong", "Packaged", "names_left"]

# The attribute of an unpickled model that has the names of its sites: path -> kinds.
NAMES = "_torchtap_sites"
_FILE = "torchtap_hooks"  # the name of the folder in a package, and of its module
_models_in: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # how many models a package has


def names_left(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The sites that were put on a model before it was pickled."""
    found: dict[str, tuple[str, ...]] = model.__dict__.get(NAMES, {})
    return found


@final
class CopiedAlong(Traveller):
    """A module's ``__deepcopy__``: its copy has the same carriers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, memo: dict[int, object]) -> nn.Module:
        made: nn.Module = self.clean_copy(self._module, memo)
        from torchtap.forms.op.carrier import put_copies

        put_copies(self._module, made)
        return made


@final
class Packaged(Traveller):
    """A model's ``__reduce_package__``, which ``torch.package`` asks for; tells pickles the names of the sites."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def left(self) -> dict[str, Any]:
        from torchtap.forms.op.carrier import carried

        return {NAMES: carried(self._model)}

    def __call__(self, exporter: Any) -> tuple[Any, ...]:
        module = _packaged_module()
        sites = self.left()[NAMES]
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        exporter.save_source_string(_FILE, source, is_package=True)
        _models_in[exporter] = number = _models_in.get(exporter, 0) + 1
        exporter.save_text(_FILE, f"sites{number}.json", json.dumps(sites, indent=1))
        state: Any = self._model.__getstate__()
        return module.restored, (type(self._model), state)


def _packaged_module() -> ModuleType:
    """`packaged` under the name that it has in a package, where it is torchtap's only file."""
    if _FILE not in sys.modules:
        path = Path(__file__).with_name("packaged.py")
        spec = importlib.util.spec_from_file_location(_FILE, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[_FILE] = module
    return sys.modules[_FILE]
