"""Register functions before, after and around the calls of a model's modules.

The only file that registers forward hooks. `before` and `after` register one plain function. `Hooks` registers many on
one model, with guards, and removes them together. It guarantees:
- `Hooks.remove` removes everything in reverse order, also if one removal fails;
- copies and pickles of the model have none of these hooks;
- a function that returns None changes nothing; any other result replaces the arguments or the output;
- a function is not called in a compiler's trace or in a checkpoint's replay, unless it says so.

``way`` is one of three methods of attachment: ``"hook"`` uses torch's hooks, ``"wrap"`` and ``"forward"`` are in
`replace`. All three pass on the same values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias, final, get_args

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchtap._torch import graph_task
from torchtap.errors import PlanError
from torchtap.hooks.conceal import Hook, conceal, reveal

__all__ = ["Handle", "HookSpec", "Hooks", "Way", "WayName", "after", "before"]

WayName = Literal["hook", "wrap", "forward"]
Function: TypeAlias = Callable[..., Any]

is_compiling: Callable[[], bool] = torch.compiler.is_compiling
_REGISTER_BEFORE = nn.Module.register_forward_pre_hook
_REGISTER_AFTER = nn.Module.register_forward_hook
_MOST_SUSPENDED = 8  # sets of hooks

# One row of torch's hook tables: the module, the table's attribute, the hook's number, the hook (or True in the tables
# of flags), and True to put it first.
Row: TypeAlias = tuple[nn.Module, str, int, object, bool]


class Handle(Protocol):
    """Something that can be removed."""

    def remove(self) -> None:
        """Remove it. A second call does nothing."""


class Way(Protocol):
    """A method of attachment."""

    def before(self, module: nn.Module, fn: Function, *, first: bool = False) -> Handle:
        """Call ``fn(module, args, kwargs)`` before each call; ``first`` puts it before other hooks."""

    def after(self, module: nn.Module, fn: Function, *, always: bool = False) -> Handle:
        """Call ``fn(module, args, output)`` after each call; ``always`` also if it raised, with output None."""


@final
class HookSpec(NamedTuple):
    """A function to call after each call of a module, ``fn(module, args, output)``, or before it.

    before: call ``fn(module, args, kwargs)`` before each call.
    first: call it before the hooks that are there.
    always: call it also if the module raised, with output None.
    with_kwargs: call ``fn(module, args, kwargs, output)`` after each call.
    """

    module: nn.Module
    fn: Function
    before: bool = False
    first: bool = False
    always: bool = False
    with_kwargs: bool = False


# -- torch's hooks ----------------------------------------------------------------------------------------------


def before(module: nn.Module, fn: Function, *, first: bool = False, copied: bool = False) -> Handle:
    """Call ``fn(module, args, kwargs)`` before each call of a module.

    first: call it before the hooks that are there.
    copied: have copies and pickles of the module carry it; tracers see ``fn`` itself.
    """
    return _handle(HookSpec(module, fn, before=True, first=first), copied)


def after(
    module: nn.Module, fn: Function, *, always: bool = False, with_kwargs: bool = False, copied: bool = False
) -> Handle:
    """Call ``fn(module, args, output)`` after each call of a module.

    always: call it also if the module raised, with output None.
    with_kwargs: call ``fn(module, args, kwargs, output)``.
    copied: have copies and pickles of the module carry it; tracers see ``fn`` itself.
    """
    return _handle(HookSpec(module, fn, always=always, with_kwargs=with_kwargs), copied)


def _handle(spec: HookSpec, copied: bool) -> Handle:
    return _OwnHook(spec, copied) if _registers_itself(spec) else HookRows([spec], copied)


def _registers_itself(spec: HookSpec) -> bool:
    """Return True if the module's class has its own method to register such a hook."""
    cls = type(spec.module)
    if spec.before:
        return cls.register_forward_pre_hook is not _REGISTER_BEFORE
    return cls.register_forward_hook is not _REGISTER_AFTER


def _way(root: nn.Module, name: str) -> Way | None:
    """Return a method of attachment; None for torch's hooks."""
    if name == "hook":
        return None
    if name not in get_args(WayName):
        raise PlanError(f"way={name!r}: a tap is put on by {', '.join(map(repr, get_args(WayName)))}")
    from torchtap.hooks.replace import ForwardWay, WrapWay

    return WrapWay(root) if name == "wrap" else ForwardWay()


_numbers_lock = threading.Lock()


def _rows(specs: list[HookSpec], copied: bool) -> list[Row]:
    """Return the rows of hooks under new numbers of torch's own, with one for each table of flags."""
    with _numbers_lock:
        number = RemovableHandle.next_id
        RemovableHandle.next_id = number + len(specs)
    rows: list[Row] = []
    for module, fn, is_before, first, always, with_kwargs in specs:
        hook = fn if copied or type(fn) is Hook else Hook(fn)
        table = "_forward_pre_hooks" if is_before else "_forward_hooks"
        rows.append((module, table, number, hook, first))
        if is_before or with_kwargs:
            rows.append((module, f"{table}_with_kwargs", number, True, False))
        if always:
            rows.append((module, "_forward_hooks_always_called", number, True, False))
        number += 1
    return rows


@final
class HookRows:
    """Hooks that are registered and removed together, again and again, under the same numbers.

    The rows go directly into torch's tables. That takes a fraction of the time of ``register_forward_hook``, which
    dominates the cost of a small capture, or of one scheduled step among many.
    """

    __slots__ = ("modules", "rows", "tables")

    def __init__(self, specs: list[HookSpec], copied: bool = False) -> None:
        self.rows = _rows(specs, copied)
        self.modules = [spec.module for spec in specs]
        self.tables: list[Any] | None = None  # the tables that hold the rows; None while removed
        self.register()

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Return all registered rows of these as one; the parts must not be used any more."""
        if len(parts) == 1:
            return parts[0]
        parts = [part for part in parts if part.tables is not None]
        made = cls.__new__(cls)
        made.modules = [module for part in parts for module in part.modules]
        made.rows = list(chain.from_iterable(part.rows for part in parts))
        made.tables = list(chain.from_iterable(part.tables or () for part in parts))
        return made

    def register(self) -> None:
        """Register the hooks, after those that others have registered meanwhile. If one fails, none is registered."""
        if self.tables is not None:
            return
        tables: list[Any] = []
        try:
            for module, name, number, value, first in self.rows:
                table = getattr(module, name)
                tables.append(table)
                table[number] = value
                if first:
                    table.move_to_end(number, last=False)
        except BaseException:
            self._take_out(tables)
            raise
        self.tables = tables
        conceal(self.modules)

    def remove(self) -> None:
        """Remove the hooks. A second call does nothing."""
        tables, self.tables = self.tables, None
        if tables is None:
            return
        self._take_out(tables)
        reveal(self.modules)

    def _take_out(self, tables: list[Any]) -> None:
        for table, row in zip(tables, self.rows, strict=False):
            table.pop(row[2], None)  # others may have removed it

    @property
    def lost(self) -> list[nn.Module]:
        """The modules from which others have removed hooks of ours."""
        if self.tables is None:
            return []
        return [module for module, name, number, *_ in self.rows if number not in getattr(module, name)]


@final
class _OwnHook:
    """A hook that the module's class has registered in its own way. It cannot be registered again."""

    __slots__ = ("_handle", "_module")

    def __init__(self, spec: HookSpec, copied: bool) -> None:
        self._module: nn.Module | None = spec.module
        hook = spec.fn if copied or type(spec.fn) is Hook else Hook(spec.fn)
        if spec.before:
            self._handle = spec.module.register_forward_pre_hook(hook, prepend=spec.first, with_kwargs=True)
        else:
            self._handle = spec.module.register_forward_hook(
                hook, always_call=spec.always, with_kwargs=spec.with_kwargs
            )
        conceal([spec.module])

    @property
    def lost(self) -> list[nn.Module]:
        """The module, if others have removed the hook."""
        there = self._handle.id in (self._handle.hooks_dict_ref() or {})
        return [] if self._module is None or there else [self._module]

    def remove(self) -> None:
        module, self._module = self._module, None
        if module is not None:
            self._handle.remove()
            reveal([module])


# -- many hooks with guards -------------------------------------------------------------------------------------


def _nothing(*_: object) -> None:
    """Add nothing to a compiler's graph."""


@final
class Hooks:
    """Guarded hooks on the modules of one model.

    root: the model.
    way: the method of attachment.

    ``traced`` is called instead of ``fn`` when a compiler traces the module; what it does becomes part of the graph.
    With ``replays`` a function is also called when activation checkpointing repeats a call, with one more argument:
    True for a replay.
    """

    def __init__(self, root: nn.Module, way: WayName = "hook") -> None:
        self._root = root
        self._way = _way(root, way)
        self._registered: list[Handle] = []
        self._kept: list[Handle] = []
        self._suspended: dict[Hashable, HookRows] = {}

    def before(
        self, module: nn.Module, fn: Function, *, replays: bool = False, traced: Function = _nothing
    ) -> None:
        """Call ``fn(args, kwargs)`` before each call of a module."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if is_compiling():
                return traced(args, kwargs)
            if replays:
                return fn(args, kwargs, graph_task() != -1)
            return fn(args, kwargs) if graph_task() == -1 else None

        self.register([HookSpec(module, hook, before=True)])

    def after(
        self, module: nn.Module, fn: Function, *, replays: bool = False, traced: Function = _nothing
    ) -> None:
        """Call ``fn(output)`` after each call of a module."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if is_compiling():
                return traced(output)
            if replays:
                return fn(output, graph_task() != -1)
            return fn(output) if graph_task() == -1 else None

        self.register([HookSpec(module, hook)])

    def register(self, specs: list[HookSpec]) -> None:
        """Register functions that have guards of their own, all together."""
        way = self._way
        if way is not None:
            for module, fn, is_before, first, always, _ in specs:
                put = (
                    way.before(module, fn, first=first) if is_before else way.after(module, fn, always=always)
                )
                self._registered.append(put)
            return
        plain: list[HookSpec] = []
        for spec in specs:
            if _registers_itself(spec):
                self._registered.append(_OwnHook(spec, False))
            else:
                plain.append(spec)
        if plain:
            self._registered.append(HookRows(plain))

    def around(self, begin: Function, end: Function | None = None, *, traced: Function = _nothing) -> None:
        """Call ``begin()`` before everything else in a pass, and ``end()`` after it, also if the pass raised.

        A compiler's trace is no pass, nor is a replay of the whole model. Both are called in every thread.
        """

        def on_begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if is_compiling():
                traced(args, kwargs)
            elif graph_task() == -1:
                begin()

        def on_end(*_: object) -> None:
            if end is not None and not is_compiling():
                end()

        self.register([HookSpec(self._root, on_begin, before=True, first=True)])
        if end is not None:
            self.register([HookSpec(self._root, on_end, always=True)])

    def when_done(self, module: nn.Module, fn: Function) -> None:
        """Call ``fn()`` when a call of a module is over, also if it raised."""
        self.register([HookSpec(module, lambda *_: fn(), always=True)])

    def keep(self, handle: Handle) -> None:
        """Remove this too, with the rest."""
        self._kept.append(handle)

    def lost(self) -> list[nn.Module]:
        """Return the modules from which others have removed hooks of ours."""
        self._join()
        found = [module for each in self._registered for module in getattr(each, "lost", ())]
        return list({id(module): module for module in found}.values())

    def _join(self) -> None:
        if len(self._registered) < 2:
            return
        rows = [each for each in self._registered if isinstance(each, HookRows)]
        others = [each for each in self._registered if not isinstance(each, HookRows)]
        self._registered = [*others, HookRows.joined(rows)] if rows else others

    def suspend(self, key: Hashable) -> None:
        """Remove all hooks, but keep them for `resume`."""
        self._join()
        match self._registered:
            case [HookRows() as rows]:  # else a class or another way has registered some
                if key not in self._suspended and len(self._suspended) >= _MOST_SUSPENDED:
                    del self._suspended[next(iter(self._suspended))]
                self._suspended[key] = rows
        self._remove_all()

    def resume(self, key: Hashable) -> bool:
        """Register the hooks that were suspended under a key. Return False if there are none."""
        rows = self._suspended.get(key)
        if rows is None:
            return False
        rows.register()
        self._registered.append(rows)
        return True

    def remove(self) -> None:
        """Remove all hooks, also the suspended ones. New ones can be registered afterwards."""
        self._suspended.clear()
        self._remove_all()

    def _remove_all(self) -> None:
        handles = [*self._registered, *self._kept]
        self._registered, self._kept = [], []
        failed: Exception | None = None
        for handle in reversed(handles):
            try:
                handle.remove()
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed
