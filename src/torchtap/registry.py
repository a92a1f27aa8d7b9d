"""Things that are asked for by name: the built-in ones, and those of installed packages by their entry points.

Nothing is imported before it is asked for. What is found is handed over as it is: whether it is of use, the
caller judges.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, final

from torchtap.errors import TorchtapError

__all__ = ["Registry", "imported"]


def imported(place: str) -> Any:
    """What is at ``"package.module:attribute"``."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


@final
@dataclass(frozen=True)
class Registry:
    """Names of one sort of thing (``what``) to where they are, ``"package.module:attribute"``."""

    what: str
    group: str  # of entry points
    built_in: Mapping[str, str]
    error: type[TorchtapError]

    def names(self) -> list[str]:
        """All names there are, without importing anything."""
        return sorted({*self.built_in, *(entry.name for entry in entry_points(group=self.group))})

    def load(self, name: str) -> Any:
        """What goes by ``name``."""
        if name in self.built_in:
            return imported(self.built_in[name])
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
            f"there is no {self.what} {name!r}{meant}; known are {', '.join(known)}. A package adds its own by an "
            f"entry point in the group {self.group!r}"
        )
