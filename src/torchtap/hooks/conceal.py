"""Keep torchtap's hooks out of copies and pickles of a model.

While torchtap has anything on a module, the module has a ``__getstate__`` that leaves it out. So ``torch.save``,
``pickle``, ``copy.deepcopy`` and ``torch.jit.script`` of a watched model give what they give without torchtap.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, final

from torch import fx, nn

from torchtap._torch import patch_script_compiler

__all__ = [
    "CleanCopy",
    "CleanState",
    "Hook",
    "StandIn",
    "Traveller",
    "Wrapper",
    "clean_copy",
    "conceal",
    "held",
    "is_wrapper",
    "reveal",
]

_STATE, _COPY = "__getstate__", "__deepcopy__"
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FLAG_TABLES = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


@final
class Hook(partial[Any]):
    """A function that torchtap has put on a module. Copies of the module have a no-op instead."""

    def __reduce__(self) -> tuple[object, ...]:
        return _nothing, ()

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _inert


def _inert(*_: object) -> None:
    """Do nothing: a hook in a copy of a module."""


def _nothing() -> Callable[..., None]:
    return _inert


class Traveller:
    """Something on a module that its copies carry. A pickle has plain attributes instead."""

    def left(self) -> dict[str, Any]:
        """Return the attributes that a pickle of the module has instead."""
        return {}

    @staticmethod
    def clean_copy(module: nn.Module, memo: dict[int, Any]) -> Any:
        """Copy a module without what torchtap has put on it."""
        return clean_copy(module, memo)


class StandIn(ABC):
    """A replacement of a module's forward."""

    @abstractmethod
    def own(self) -> Any:
        """Return the forward that the module had as its own attribute; None if its class has it."""


class Wrapper:
    """A wrapper around a module that shares its ``__dict__``."""

    __slots__ = ()
    _torchtap_held: nn.Module


_OTHERWISE = (fx.GraphModule, Wrapper)


def is_wrapper(module: object) -> bool:
    """Return True if a module is torchtap's wrapper around another."""
    return issubclass(type(module), Wrapper)  # its __class__ is the module's


def held(module: Any) -> Any:
    """Return the module inside any number of our wrappers."""
    while is_wrapper(module):
        module = module._torchtap_held
    return module


@final
class CleanState(weakref.ref[nn.Module]):
    """A module's ``__getstate__`` that leaves out what torchtap has put on it. It is a weak reference to the module."""

    __slots__ = ("count",)
    count: int  # of our things on the module

    def __call__(self) -> Any:
        module = super().__call__()
        assert module is not None
        state = type(module).__getstate__(module)
        if isinstance(state, tuple):  # a class with slots
            return tuple(cleaned(each) if isinstance(each, dict) else each for each in state)
        return cleaned(state) if isinstance(state, dict) else state


@final
class CleanCopy(weakref.ref[nn.Module]):
    """A module's ``__deepcopy__`` for a class that has its own, which copies every attribute: a parametrized one."""

    def __call__(self, memo: dict[int, Any]) -> Any:  # type: ignore[override]
        module = super().__call__()
        assert module is not None
        return clean_copy(module, memo)


def clean_copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Copy a module without what torchtap has put on it."""
    own = module.__dict__
    kept, clean = dict(own), cleaned(own)
    own.clear()
    own.update(clean)
    try:
        return copy.deepcopy(module, memo)
    finally:
        own.clear()
        own.update(kept)


def conceal(modules: Iterable[nn.Module]) -> None:
    """Keep what torchtap puts on modules out of their copies. Calls are counted."""
    hide_from_script()
    for module in modules:
        own = module.__dict__
        known = own.get(_STATE)
        if isinstance(known, CleanState):
            known.count += 1
            continue
        if isinstance(module, _OTHERWISE):
            module = held(module)
            if isinstance(module, fx.GraphModule):  # it copies itself without asking for a state
                continue
        own[_STATE] = state = CleanState(module)
        state.count = 1
        if hasattr(type(module), _COPY) and _COPY not in own:
            own[_COPY] = CleanCopy(module)


def reveal(modules: Iterable[nn.Module]) -> None:
    """Undo one call of `conceal`."""
    for module in modules:
        own = module.__dict__
        known = own.get(_STATE)
        if isinstance(known, CleanState):
            known.count -= 1
            if not known.count:
                del own[_STATE]
                if isinstance(own.get(_COPY), CleanCopy):
                    del own[_COPY]


@cache
def hide_from_script() -> None:
    """Make TorchScript leave out our hooks, as pickles and copies do."""
    patch_script_compiler(_ours_off)


def _ours_off(model: nn.Module) -> AbstractContextManager[None]:
    return ours_off(model)


def cleaned(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without those of torchtap."""
    clean = {
        name: value
        for name, value in state.items()
        if not isinstance(value, (CleanState, CleanCopy, Hook, Traveller))
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
    """Return the hook tables without torchtap's hooks."""
    ours = {
        key
        for table in _HOOK_TABLES
        for key, hook in (state.get(table) or {}).items()
        if isinstance(hook, (Hook, Traveller))
    }
    return {
        table: OrderedDict((key, hook) for key, hook in state[table].items() if key not in ours)
        for table in (*_HOOK_TABLES, *_FLAG_TABLES)
        if ours and state.get(table)
    }


@contextmanager
def ours_off(model: nn.Module) -> Iterator[None]:
    """Remove torchtap's hooks from a model inside this block."""
    taken: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        attributes = module.__dict__
        if isinstance(attributes.get(_STATE), CleanState):
            clean = cleaned(attributes)
            for table in (*_HOOK_TABLES, *_FLAG_TABLES):
                taken.append((attributes, table, attributes[table]))
                attributes[table] = clean[table]
    try:
        yield
    finally:
        for attributes, table, hooks in taken:
            attributes[table] = hooks
