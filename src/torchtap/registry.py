"""Extensions by name: built-in ones, those of installed packages, and those registered in this process.

Nothing is imported before its name is used. The caller checks that the object found is of the right kind.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar, final

from torchtap.errors import PlanError, TorchtapError

__all__ = ["Registry", "imported", "register"]

Extension = TypeVar("Extension")

_REGISTERED: dict[str, dict[str, Any]] = {}  # by group, then by name
# The entry-point group of each kind of extension, by the methods that it has.
_GROUPS = {
    "torchtap.reductions": ("update", "merge", "result"),
    "torchtap.rules": ("judge",),
    "torchtap.sinks": ("write", "close"),
}


def imported(place: str) -> Any:
    """Return the object at ``"package.module:attribute"``."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def register(extension: Extension, name: str | None = None) -> Extension:
    """Make a reduction, a rule or a sink known by its name in this process.

    >>> @tt.register
    ... class Product(tt.Reduction): ...

    extension: the class of a reduction or sink, or a rule. A rule may also be its class.
    name: the name; by default the extension's own attribute ``name``. Sinks have none, so they need it.

    Returns the extension, so that it can be used as a decorator. A package that others install does the same with an
    entry point in the group ``torchtap.reductions``, ``torchtap.rules`` or ``torchtap.sinks``.

    Raises `PlanError` if the object is none of these or has no name.
    """
    group = next(
        (group for group, methods in _GROUPS.items() if all(hasattr(extension, each) for each in methods)),
        None,
    )
    if group is None:
        raise PlanError(
            f"{extension!r} is no extension: a reduction has update, merge and result, a rule has judge, a sink has "
            "write and close"
        )
    name = name or getattr(extension, "name", None)
    if not isinstance(name, str):
        raise PlanError(f"register({extension!r}) needs a name, e.g. register({extension!r}, 'mine')")
    _REGISTERED.setdefault(group, {})[name] = extension
    return extension


@final
@dataclass(frozen=True)
class Registry:
    """The names of one kind of extension (``what``), each with its place, ``"package.module:attribute"``."""

    what: str
    group: str  # of entry points
    built_in: Mapping[str, str]
    error: type[TorchtapError]

    def names(self) -> list[str]:
        """Return all names without importing anything."""
        installed = (entry.name for entry in entry_points(group=self.group))
        return sorted({*self.built_in, *_REGISTERED.get(self.group, ()), *installed})

    def load(self, name: str) -> Any:
        """Return the extension of this name. Built-in ones come first."""
        if name in self.built_in:
            return imported(self.built_in[name])
        if name in _REGISTERED.get(self.group, ()):
            return _REGISTERED[self.group][name]
        for entry in entry_points(group=self.group, name=name):
            try:
                return entry.load()
            except Exception as error:
                raise self.error(
                    f"the {self.what} {name!r} of {entry.value!r} cannot be imported: {error!r}"
                ) from error
        known = self.names()
        near = difflib.get_close_matches(name, known, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise self.error(
            f"there is no {self.what} {name!r}{meant}; known are {', '.join(known)}. torchtap.register(...) adds one "
            f"in this process, an entry point in the group {self.group!r} adds one for every process"
        )
