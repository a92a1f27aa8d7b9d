"""Keep torchtap's hooks out of copies and pickles of a model.

While torchtap has anything on a module, the module has a ``__getstate__`` that leaves it out. So ``torch.save``,
``pickle`` and ``copy.deepcopy`` of a watched model give what they would give without torchtap, at any moment. What is
left out, and how, is in `cleaning`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, final

from torch import fx, nn

from torchtap._torch import patch_script_compiler

__all__ = [
    "CleanState",
    "Hook",
    "StandIn",
    "Traveller",
    "Wrapper",
    "clean_state",
    "conceal",
    "held",
    "is_concealed",
    "is_wrapper",
    "reveal",
]

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
class CleanState(weakref.ref[nn.Module]):
    """A module's ``__getstate__`` without what is ours. It refers to the module, and is made in no time."""

    __slots__ = ("count",)
    count: int  # of our things on the module

    def __call__(self) -> Any:
        from torchtap.hooks.cleaning import cleaned  # here: most models are never copied

        module = super().__call__()
        assert module is not None
        state = type(module).__getstate__(module)
        if isinstance(state, tuple):  # a class with slots
            return tuple(cleaned(each) if isinstance(each, dict) else each for each in state)
        return cleaned(state) if isinstance(state, dict) else state


def is_concealed(attributes: dict[str, Any]) -> bool:
    """Whether anything of torchtap's is on the module that has these attributes."""
    return isinstance(attributes.get(_STATE), CleanState)


def clean_state(module: nn.Module) -> CleanState | None:
    """What keeps things on a module out of its copies; None where its class makes them, and asks for no state."""
    hide_from_script()
    if isinstance(module, _OTHERWISE):
        module = held(module)
        if isinstance(module, fx.GraphModule):
            return None
    return CleanState(module)


# Both are done for each hook that goes on and off, by native code where it was built (`hooks`).


def conceal(module: nn.Module, state: CleanState | None = None) -> None:
    """Torchtap puts something on a module: keep it out of copies. It has the state now, if it has no such one yet."""
    own = module.__dict__
    known = own.get(_STATE)
    if isinstance(known, CleanState):
        known.count += 1
    elif (state := state or clean_state(module)) is not None:
        state.count = 1
        own[_STATE] = state


def reveal(module: nn.Module) -> None:
    """Torchtap takes something off a module."""
    own = module.__dict__
    known = own.get(_STATE)
    if isinstance(known, CleanState):
        known.count -= 1
        if not known.count:
            del own[_STATE]


@cache
def hide_from_script() -> None:
    """Have TorchScript leave our hooks out of what it makes of a module, as pickles and copies do."""
    patch_script_compiler(_ours_off)


def _ours_off(model: nn.Module) -> AbstractContextManager[None]:
    from torchtap.hooks.cleaning import ours_off

    return ours_off(model)
