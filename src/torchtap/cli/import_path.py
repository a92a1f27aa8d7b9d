"""Import an object that a command line names: ``package.module:name`` or ``script.py:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from torchtap.errors import FormError

__all__ = ["find_named"]


def find_named(text: str, wanted: str) -> tuple[str, object]:
    """Return the name behind the colon and the object. ``wanted`` is the expected form, for the error."""
    source, colon, name = text.rpartition(":")
    if not colon or not name:
        raise FormError(f"{text!r} {wanted}")
    found = getattr(_module(source), name, None)
    if found is None:
        raise FormError(f"{source!r} has no {name!r}")
    return name, found


def _module(source: str) -> ModuleType:
    if source.endswith(".py"):
        return _script(Path(source))
    sys.path.insert(0, "")
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        raise FormError(f"cannot import {source!r}: {error}") from None


def _script(path: Path) -> ModuleType:
    if not path.is_file():
        raise FormError(f"there is no script {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
