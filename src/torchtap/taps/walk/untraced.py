"""Keep torchtap's hooks out of copies and pickles of a model.

While torchtap has anything on a module, the module has a ``__getstate__`` that leaves it out. So ``torch.save``,
``pickle`` and ``copy.deepcopy`` of a watched model give what they would give without torchtap, at any moment.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeAlias, final

from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from torchtap._torch import patch_script_compiler

__all__ = [
    "Hook",
    "HookHandle",
    "HookHandles",
    "ModeHook",
    "StandIn",
    "Table",
    "Traveller",
    "Wrapper",
    "conceal",
    "held",
    "is_wrapper",
    "reveal",
]

_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOTES_OF_HOOKS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
Table: TypeAlias = Any  # torch's of hooks: an ordered dict from numbers
_AT_ONCE = 1024  # numbers
_STATE = "__getstate__"


@final
class Hook(partial[Any]):
    """A function that torchtap put on a module. A ``partial`` without arguments adds next to nothing to the call."""

    def __reduce__(self) -> tuple[object, ...]:
        return _nothing, ()

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _inert


def _inert(*_: object) -> None:
    """What a hook becomes where a module's own way of copying takes it along."""


def _nothing() -> Callable[..., None]:
    return _inert


class Traveller:
    """Something on a module that its copies take along. A pickle has plain names in its place."""

    def left(self) -> dict[str, Any]:
        """The attributes that a pickle of the module has instead."""
        return {}


class StandIn(ABC):
    """Stands in for a module's forward."""

    @abstractmethod
    def own(self) -> Any:
        """The forward that was among the module's own attributes; None where its class has it."""


class Wrapper:
    """Stands around a module and shares its ``__dict__``: the same dict means the same module."""

    __slots__ = ()
    _torchtap_held: nn.Module


# These are concealed in ways of their own.
_OTHERWISE = (fx.GraphModule, Wrapper)


def is_wrapper(module: object) -> bool:
    """Whether a module is torchtap's wrapper around another."""
    return issubclass(type(module), Wrapper)  # it says that it is of the module's class


def held(module: Any) -> Any:
    """The module inside any number of our wrappers."""
    while is_wrapper(module):
        module = module._torchtap_held
    return module


@final
class _CleanState(weakref.ref[nn.Module]):
    """A module's ``__getstate__`` without what is ours. It refers to the module, and is made in no time."""

    __slots__ = ("count",)
    count: int  # of our things on the module

    def __call__(self) -> Any:
        module = super().__call__()
        assert module is not None
        state = type(module).__getstate__(module)
        if isinstance(state, tuple):  # a class with slots
            return tuple(_cleaned(each) if isinstance(each, dict) else each for each in state)
        return _cleaned(state) if isinstance(state, dict) else state


def _cleaned(state: dict[str, Any]) -> dict[str, Any]:
    clean = {
        name: value for name, value in state.items() if not isinstance(value, (_CleanState, Hook, Traveller))
    }
    for value in state.values():
        if isinstance(value, Traveller):
            clean.update(value.left())
    forward = state.get("forward")
    if isinstance(forward, StandIn):
        clean.pop("forward")
        if (own := forward.own()) is not None:
            clean["forward"] = own
    children = state.get("_modules")
    if children and any(map(is_wrapper, children.values())):
        clean["_modules"] = type(children)((name, held(child)) for name, child in children.items())
    return clean | _tables_without_ours(state)


def _tables_without_ours(state: dict[str, Any]) -> dict[str, Any]:
    """The tables that hold torchtap's hooks, without these."""
    ours = {
        key
        for table in _HOOK_TABLES
        for key, hook in (state.get(table) or {}).items()
        if isinstance(hook, (Hook, Traveller))
    }
    return {
        table: OrderedDict((key, hook) for key, hook in state[table].items() if key not in ours)
        for table in (*_HOOK_TABLES, *_NOTES_OF_HOOKS)
        if ours and state.get(table)
    }


def conceal(module: nn.Module) -> None:
    """Torchtap puts something on a module: keep it out of copies."""
    attributes = module.__dict__
    known = attributes.get(_STATE)
    if not isinstance(known, _CleanState):
        module = held(module)
        if isinstance(module, fx.GraphModule):
            return  # its class makes its pickles and copies, and asks for no state
        hide_from_script()
        known = attributes[_STATE] = _CleanState(module)
        known.count = 0
    known.count += 1


def reveal(module: nn.Module) -> None:
    """Torchtap takes something off a module."""
    known = module.__dict__.get(_STATE)
    if isinstance(known, _CleanState):
        known.count -= 1
        if not known.count:
            del module.__dict__[_STATE]


@cache
def hide_from_script() -> None:
    """Have TorchScript leave our hooks out of what it makes of a module, as pickles and copies do."""
    patch_script_compiler(_ours_off)


@contextmanager
def _ours_off(model: nn.Module) -> Iterator[None]:
    """A block in which the model's modules do not have torchtap's hooks."""
    taken: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        attributes = module.__dict__
        if isinstance(attributes.get(_STATE), _CleanState):
            clean = _cleaned(attributes)
            for table in (*_HOOK_TABLES, *_NOTES_OF_HOOKS):
                taken.append((attributes, table, attributes[table]))
                attributes[table] = clean[table]
    try:
        yield
    finally:
        for attributes, table, hooks in taken:
            attributes[table] = hooks


_lock = threading.Lock()
_numbers: Iterator[int] = iter(())


def _new_number() -> int:
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


@final
class HookHandle:
    """A hook on a module, and what takes it off again.

    It puts a hook on as torch's own functions do, in a third of the time: a look inside a small model is mostly hooks
    that come and go. ``notes`` are the tables in which torch notes how a hook is to be called.
    """

    __slots__ = ("_module", "_notes", "_number", "_table")

    def __init__(
        self,
        module: nn.Module,
        table: Table,
        hook: Callable[..., Any] | None,
        notes: tuple[Table, ...] = (),
        number: int = -1,
        *,
        first: bool = False,
    ) -> None:
        if number < 0:
            number = _new_number()
            table[number] = hook
            for each in notes:
                each[number] = True
            if first:
                table.move_to_end(number, last=False)
        self._module: nn.Module | None = module
        self._table, self._notes, self._number = table, notes, number
        conceal(module)

    @classmethod
    def of(cls, module: nn.Module, handle: RemovableHandle) -> HookHandle:
        """For a hook that torch, or a class in its own way, has put on."""
        notes = tuple(table for each in handle.extra_dict_ref if (table := each()) is not None)
        return cls(module, handle.hooks_dict_ref() or {}, None, notes, handle.id)

    @property
    def places(self) -> list[tuple[Table, int]]:
        """Torch's table with the hook in it, and its number there."""
        return [(self._table, self._number)]

    @property
    def gone(self) -> list[nn.Module]:
        """The module, if somebody else has taken the hook off it."""
        return [] if self._module is None or self._number in self._table else [self._module]

    def remove(self) -> None:
        """Take it off; a second time does nothing."""
        module, self._module = self._module, None
        if module is not None:
            self._table.pop(self._number, None)
            for each in self._notes:
                each.pop(self._number, None)
            reveal(module)


@final
class HookHandles:
    """Hooks on many modules, one on each, and what takes them off again. They have the same number."""

    __slots__ = ("_modules", "_number")

    def __init__(self, hooks: list[tuple[nn.Module, Hook]]) -> None:
        self._number = number = _new_number()
        self._modules = [module for module, _ in hooks]
        for module, hook in hooks:
            module._forward_hooks[number] = hook
            own = module.__dict__
            if _STATE in own or isinstance(module, _OTHERWISE):
                conceal(module)
            else:  # as `conceal` does: there are many
                state = own[_STATE] = _CleanState(module)
                state.count = 1
        hide_from_script()

    @property
    def places(self) -> list[tuple[Table, int]]:
        """Torch's tables with the hooks in them, and their number there."""
        return [(module._forward_hooks, self._number) for module in self._modules]

    @property
    def gone(self) -> list[nn.Module]:
        """The modules that somebody else has taken the hook off."""
        return [module for module in self._modules if self._number not in module._forward_hooks]

    def remove(self) -> None:
        """Take them off; a second time does nothing."""
        modules, self._modules = self._modules, []
        number = self._number
        for module in modules:
            module._forward_hooks.pop(number, None)
            state = module.__dict__.get(_STATE)
            if type(state) is _CleanState and state.count == 1:  # as `reveal` does: there are many
                del module.__dict__[_STATE]
            else:
                reveal(module)


@final
class ModeHook:
    """Tells when a module is switched to training or to evaluation."""

    def __init__(self, module: nn.Module, told: Callable[[bool], None]) -> None:
        self._module = module
        self._told = told

    def put_on(self) -> None:
        """From now on it tells."""
        conceal(self._module)
        self._module.__dict__["train"] = Hook(self._train)

    def take_off(self) -> None:
        """The module is as it was."""
        if self._module.__dict__.pop("train", None) is not None:
            reveal(self._module)

    def _train(self, mode: bool = True) -> nn.Module:
        switched = type(self._module).train(self._module, mode)
        self._told(mode)
        return switched
