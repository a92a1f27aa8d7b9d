"""What is said of a name or selector that picks nothing: the names that are nearest. Text only: no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from torchtap.errors import SelectionError

__all__ = ["nearest_names", "no_such_site"]


def nearest_names(asked: str, names: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """The names most like what was asked for."""
    return tuple(difflib.get_close_matches(asked, list(names), n=count, cutoff=0.4))


def no_such_site(asked: str, names: Sequence[str], where: str, advice: str = "") -> SelectionError:
    """The error for a name or selector that picks nothing among ``names``."""
    nearest = nearest_names(asked, names)
    if nearest:
        found = "the nearest are " + ", ".join(repr(name) for name in nearest)
    elif names:
        found = "there are " + ", ".join(repr(name) for name in names[:3]) + (" …" if len(names) > 3 else "")
    else:
        found = "there are none"
    plural = "site" if len(names) == 1 else "sites"
    message = f"{asked!r} matches none of {where} {len(names)} {plural}; {found}."
    return SelectionError(f"{message} {advice}".rstrip(), nearest=nearest)
