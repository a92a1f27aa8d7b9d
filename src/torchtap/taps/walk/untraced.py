"""Keep our hooks out of copies and pickles of a model.

While a module carries anything of ours, it has a ``__getstate__`` of its own that leaves it out. So ``torch.save``,
``pickle`` and ``copy.deepcopy`` of a watched model give what they would give without us, at any moment.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, final

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Hook", "HookHandle", "ModeHook", "StandIn", "conceal", "held", "is_wrapper", "reveal"]

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

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _inert


def _inert(*_: Any) -> None:
    """What a hook of ours becomes where a module's own way of copying takes it along."""


def _nothing() -> Callable[..., None]:
    return _inert


class StandIn(ABC):
    """Stands in for a module's forward."""

    @abstractmethod
    def own(self) -> Any:
        """The forward that was among the module's own attributes; None where its class has it."""


def is_wrapper(module: Any) -> bool:
    """Whether a module is one of ours around another."""
    return hasattr(type(module), HELD)


def held(module: Any) -> Any:
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
    clean = {name: value for name, value in state.items() if not isinstance(value, (_CleanState, Hook))}
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
        if isinstance(hook, Hook)
    }
    return {
        table: OrderedDict((key, hook) for key, hook in state[table].items() if key not in ours)
        for table in (*_HOOK_TABLES, *_NOTES_OF_HOOKS)
        if ours and state.get(table)
    }


def conceal(module: nn.Module) -> None:
    """Something of ours is put on a module."""
    module = held(module)
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


@final
class HookHandle:
    """Takes one hook of ours off a module again."""

    __slots__ = ("_handle", "_module")

    def __init__(self, module: nn.Module, handle: RemovableHandle) -> None:
        conceal(module)
        self._module: nn.Module | None = module
        self._handle = handle

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
