"""Hooks that go on modules together, come off together, and can go on again: the same functions under the same numbers.

They are put into torch's tables as torch's own functions do it, in a fraction of the time: a look inside a small model,
or one live step among many, is mostly hooks that come and go. Native code goes through them where it was built.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain
from typing import Any, Self, TypeAlias, final

from torch import nn
from torch.utils.hooks import RemovableHandle

from torchtap.hooks.untraced import CleanState, clean_state, conceal, reveal

__all__ = ["Entry", "Hooks", "RegisteredHook", "hook_entries", "new_number"]

Table: TypeAlias = Any  # torch's of hooks: an ordered dict from numbers
# A module, the name of torch's table there, our number in it, what stands under the number (a hook, or True where torch
# notes how the hook is to be called), whether it goes ahead of all others, and what keeps it out of the module's copies
# (None: another entry has that). While garbage is collected, such a reference is dead before the module is gone.
Entry: TypeAlias = tuple[nn.Module, str, int, object, bool, CleanState | None]
_AT_ONCE = 1024  # numbers

_lock = threading.Lock()
_numbers: Iterator[int] = iter(())


def new_number() -> int:
    """A number that no hook has. They are torch's own, taken many at a time."""
    global _numbers
    number = next(_numbers, None)
    while number is None:
        with _lock:
            first = RemovableHandle.next_id
            RemovableHandle.next_id = first + _AT_ONCE
            _numbers = iter(range(first, first + _AT_ONCE))
        number = next(_numbers, None)
    return number


def put_on(entries: list[Entry]) -> list[Table]:
    """Put hooks on; the tables into which they went. Where one fails, none is on."""
    tables: list[Table] = []
    try:
        for module, name, number, value, first, _ in entries:
            table = getattr(module, name)
            tables.append(table)
            table[number] = value
            if first:
                table.move_to_end(number, last=False)
    except BaseException:
        _take_out(entries, tables)
        raise
    for module, *_, state in entries:
        if state is not None:
            conceal(module, state)
    return tables


def take_off(entries: list[Entry], tables: list[Table]) -> None:
    """Take hooks out of the tables into which they were put. What others have taken off already is no error."""
    _take_out(entries, tables)
    for module, *_, state in entries:
        if state is not None:
            reveal(module)


def _take_out(entries: list[Entry], tables: list[Table]) -> None:
    for table, entry in zip(tables, entries, strict=False):
        table.pop(entry[2], None)


def are_on(entries: list[Entry]) -> bool:
    """Whether each hook is in the table that its module has now."""
    return all(number in getattr(module, name) for module, name, number, *_ in entries)


def hook_entries(
    module: nn.Module, table: str, hook: object, notes: tuple[str, ...] = (), *, first: bool = False
) -> list[Entry]:
    """One hook under a new number. ``notes`` name the tables in which torch notes how a hook is to be called."""
    number = new_number()
    entry = module, table, number, hook, first, clean_state(module)
    return [entry, *[(module, note, number, True, False, None) for note in notes]]


@final
class Hooks:
    """Some hooks, which are on from the beginning."""

    __slots__ = ("entries", "tables")

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.tables: list[Table] | None = put_on(entries)

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """All that is on of these, as one; they are not to be used any more."""
        if len(parts) == 1:
            return parts[0]
        parts = [part for part in parts if part.tables is not None]
        made = cls.__new__(cls)
        made.entries = list(chain.from_iterable(part.entries for part in parts))
        made.tables = list(chain.from_iterable(part.tables or () for part in parts))
        return made

    def put_on(self) -> None:
        """Put them on, behind those of others that came meanwhile; a second time does nothing."""
        if self.tables is None:
            self.tables = put_on(self.entries)

    def remove(self) -> None:
        """Take them off; a second time does nothing."""
        tables, self.tables = self.tables, None
        if tables is not None:
            take_off(self.entries, tables)

    @property
    def gone(self) -> list[nn.Module]:
        """The modules that somebody else has taken hooks off."""
        if self.tables is None or are_on(self.entries):
            return []
        return [entry[0] for entry in self.entries if not are_on([entry])]


@final
class RegisteredHook:
    """A hook that a class has put on its module in its own way. What that did is not known, and not done again."""

    __slots__ = ("_handle", "_module")

    def __init__(self, module: nn.Module, handle: RemovableHandle) -> None:
        self._module: nn.Module | None = module
        self._handle = handle
        conceal(module)

    @property
    def gone(self) -> list[nn.Module]:
        """The module, if somebody else has taken the hook off it."""
        there = self._handle.id in (self._handle.hooks_dict_ref() or {})
        return [] if self._module is None or there else [self._module]

    def remove(self) -> None:
        """Take it off; a second time does nothing."""
        module, self._module = self._module, None
        if module is not None:
            self._handle.remove()
            reveal(module)
