"""Keep torchtap's hooks out of copies and pickles of a model.

While torchtap has anything on a module, the module has a ``__getstate__`` that leaves it out. So ``torch.save``,
``pickle`` and ``copy.deepcopy`` of a watched model give what they would give without torchtap, at any moment.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeAlias, final

from torch import fx, nn

from torchtap._torch import patch_script_compiler

__all__ = [
    "Concealment",
    "Hook",
    "ModeHook",
    "StandIn",
    "Traveller",
    "Wrapper",
    "conceal",
    "conceal_each",
    "concealments",
    "held",
    "is_wrapper",
    "reveal",
    "reveal_each",
]

_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOTES_OF_HOOKS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
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
        module = super().__call__()
        assert module is not None
        state = type(module).__getstate__(module)
        if isinstance(state, tuple):  # a class with slots
            return tuple(_cleaned(each) if isinstance(each, dict) else each for each in state)
        return _cleaned(state) if isinstance(state, dict) else state


def _cleaned(state: dict[str, Any]) -> dict[str, Any]:
    clean = {
        name: value for name, value in state.items() if not isinstance(value, (CleanState, Hook, Traveller))
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


# Given with its module: while garbage is collected, a reference is dead before what it refers to is gone.
Concealment: TypeAlias = tuple[nn.Module, CleanState]


def concealments(modules: Iterable[nn.Module]) -> list[Concealment]:
    """What keeps things on modules out of their copies, one for each that can be concealed."""
    made = []
    for module in modules:
        if isinstance(module, _OTHERWISE):
            module = held(module)
            if isinstance(module, fx.GraphModule):  # its class makes its copies, and asks for no state
                continue
        made.append((module, CleanState(module)))
    hide_from_script()
    return made


# Both are done for each hook that goes on and off, by native code where it was built (`hooks`).


def conceal_each(concealed: Iterable[Concealment]) -> None:
    """Torchtap puts something on each module. It has the state now, unless it has such a one already."""
    for module, state in concealed:
        own = module.__dict__
        known = own.get(_STATE)
        if isinstance(known, CleanState):
            known.count += 1
        else:
            state.count = 1
            own[_STATE] = state


def reveal_each(concealed: Iterable[Concealment]) -> None:
    """Torchtap takes something off each module."""
    for module, _ in concealed:
        reveal(module)


def conceal(module: nn.Module) -> None:
    """Torchtap puts something on a module: keep it out of copies."""
    conceal_each(concealments([module]))


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


@contextmanager
def _ours_off(model: nn.Module) -> Iterator[None]:
    """A block in which the model's modules do not have torchtap's hooks."""
    taken: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        attributes = module.__dict__
        if isinstance(attributes.get(_STATE), CleanState):
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
