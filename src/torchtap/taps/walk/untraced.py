"""Keep our hooks out of copies and pickles of a model.

While a module carries anything of ours, it has a ``__getstate__`` of its own that leaves it out. So ``torch.save``,
``pickle`` and ``copy.deepcopy`` of a watched model give what they would give without us, at any moment.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, final

from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from torchtap._torch import patch_script_compiler

__all__ = [
    "Hook",
    "HookHandle",
    "ModeHook",
    "StandIn",
    "Traveller",
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
_STATE = "__getstate__"
HELD = "_torchtap_held"  # the attribute of a wrapper that has the module in it


@final
class Hook(partial[Any]):
    """A function of ours on a module. A ``partial`` without arguments adds next to nothing to the call."""

    def __reduce__(self) -> tuple[object, ...]:
        return _nothing, ()

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _inert


def _inert(*_: object) -> None:
    """What a hook of ours becomes where a module's own way of copying takes it along."""


def _nothing() -> Callable[..., None]:
    return _inert


class Traveller:
    """Something of ours on a module that its copies take along. A pickle has plain names in its place."""

    def left(self) -> dict[str, Any]:
        """The attributes that a pickle of the module has instead."""
        return {}


class StandIn(ABC):
    """Stands in for a module's forward."""

    @abstractmethod
    def own(self) -> Any:
        """The forward that was among the module's own attributes; None where its class has it."""


def is_wrapper(module: object) -> bool:
    """Whether a module is one of ours around another."""
    return hasattr(type(module), HELD)


def held(module: object) -> Any:
    """The module inside any number of our wrappers."""
    while is_wrapper(module):
        module = getattr(module, HELD)
    return module


@final
class _CleanState:
    """A module's ``__getstate__`` without what is ours."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.count = 0  # of our things on the module

    def __call__(self) -> Any:
        module = self._module()
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
    """The tables of hooks that have one of ours in them, without it."""
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
    """Something of ours is put on a module."""
    hide_from_script()
    module = held(module)
    if isinstance(module, fx.GraphModule):
        return  # its class makes its pickles and copies, and asks for no state
    known = module.__dict__.get(_STATE)
    if not isinstance(known, _CleanState):
        known = module.__dict__[_STATE] = _CleanState(module)
    known.count += 1


def reveal(module: nn.Module) -> None:
    """Something of ours is taken off a module."""
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
    """The modules of a model without hooks of ours, for as long as it lasts."""
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


@final
class HookHandle:
    """Takes one hook of ours off a module again."""

    __slots__ = ("_handle", "_module")

    def __init__(self, module: nn.Module, handle: RemovableHandle) -> None:
        conceal(module)
        self._module: nn.Module | None = module
        self._handle = handle

    @property
    def place(self) -> tuple[Any, int]:
        """Torch's table with the hook in it, and its number there."""
        return self._handle.hooks_dict_ref(), self._handle.id

    @property
    def gone(self) -> nn.Module | None:
        """The module, if somebody else has taken the hook off it."""
        hooks = self._handle.hooks_dict_ref()
        return self._module if hooks is None or self._handle.id not in hooks else None

    def remove(self) -> None:
        """Take it off; a second time does nothing."""
        module, self._module = self._module, None
        if module is not None:
            self._handle.remove()
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
