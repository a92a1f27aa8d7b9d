"""Replace a module's forward, the module itself by a wrapper, or its ``train`` method.

It guarantees:
- removal puts back the objects that were there, in the same places and order; a module that was given a
  new child or forward in between keeps it;
- while wrapped, ``state_dict`` has the same keys, attributes are the same in both directions, ``isinstance``
  says the same, and code that calls ``module.forward`` is seen as well;
- a copy or a pickle of the model is of the model as it was.

A wrapped module is a second face of the same object: an instance of a subclass of its class whose ``__dict__``
is the module's own. A root has no parent that could hold its wrapper, so its forward is replaced instead.
References to a module outside the module tree (a plain list) go past a wrapper; ``way="forward"`` and hooks
see those too. A replaced forward sees a value before hooks of the user's own change it.
"""

from __future__ import annotations

import copy
import functools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from torchtap.errors import FormError
from torchtap.hooks.conceal import StandIn, Traveller, Wrapper, conceal, is_wrapper, reveal
from torchtap.hooks.hooks import Function, Handle
from torchtap.hooks.leaves import Args, Kwargs

__all__ = ["ForwardWay", "ModeHook", "WrapWay", "replace_forward"]

_TRAIN = "train"


@final
@dataclass(slots=True)
class _Around:
    """The functions around one module's calls."""

    before: list[Function] = field(default_factory=list)
    after: list[Function] = field(default_factory=list)
    always: list[Function] = field(default_factory=list)
    take_off: Callable[[], None] = lambda: None  # once nothing is left to run

    def run(self, module: nn.Module, call: Function, args: Args, kwargs: Kwargs) -> object:
        output = None
        try:
            for action in tuple(self.before):
                instead = action(module, args, kwargs)
                if instead is not None:
                    args, kwargs = instead
            output = call(*args, **kwargs)
            for action in tuple(self.after):
                instead = action(module, args, output)
                if instead is not None:
                    output = instead
        finally:
            for action in tuple(self.always):
                action(module, args, output)
        return output

    def put(self, place: list[Function], action: Function, first: bool = False) -> Handle:
        place.insert(0 if first else len(place), action)
        return _Removal(self, place, action)

    @property
    def empty(self) -> bool:
        return not (self.before or self.after or self.always)


@final
@dataclass(slots=True, eq=False)
class _Removal:
    """Remove one function, and the replacement with the last of them."""

    around: _Around
    place: list[Function]
    action: Function

    def remove(self) -> None:
        if self.action in self.place:
            self.place.remove(self.action)
            if self.around.empty:
                self.around.take_off()


class _Replacing(ABC):
    """Run functions around calls by replacing something of each module."""

    def __init__(self) -> None:
        self._arounds: dict[int, _Around] = {}

    def before(self, module: nn.Module, action: Function, *, first: bool = False) -> Handle:
        around = self._around(module)
        return around.put(around.before, action, first)

    def after(self, module: nn.Module, action: Function, *, always: bool = False) -> Handle:
        around = self._around(module)
        return around.put(around.always if always else around.after, action)

    def _around(self, module: nn.Module) -> _Around:
        around = self._arounds.get(id(module))
        if around is None or around.empty:
            around = _Around()
            around.take_off = self._put_on(module, around)
            self._arounds[id(module)] = around
        return around

    @abstractmethod
    def _put_on(self, module: nn.Module, around: _Around) -> Callable[[], None]:
        """Let ``around`` run the module's calls. Return a function that undoes it."""


# -- way="forward" ---------------------------------------------------------------------------------------------


@final
class _Forward(StandIn):
    """A replaced forward. A copy of the module has the plain forward again."""

    def __init__(self, module: nn.Module, run: Function) -> None:
        self.module, self.run = module, run
        self.plain: Function = module.forward
        self.was_own = "forward" in vars(module)
        functools.update_wrapper(self, self.plain, updated=())

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.run(self.plain, args, kwargs)

    def own(self) -> object:
        inner: object = self.plain
        if isinstance(inner, StandIn):
            return inner.own()
        return inner if self.was_own else None

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if self.was_own:
            return copy.deepcopy(self.plain, memo)
        return _forward_of_class(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> tuple[object, ...]:
        if self.was_own:
            return _itself, (self.plain,)
        return _forward_of_class, (self.module,)

    def take_off(self) -> None:
        """Restore the plain forward, also if others have replaced this one."""
        attributes = vars(self.module)
        current = attributes.get("forward")
        if current is self:
            if self.was_own:
                attributes["forward"] = self.plain
            else:
                del attributes["forward"]
            return
        while isinstance(current, _Forward):
            if current.plain is self:
                current.plain, current.was_own = self.plain, self.was_own
                return
            current = current.plain


def _forward_of_class(module: nn.Module) -> object:
    return types.MethodType(type(module).forward, module)


def _itself(value: object) -> object:
    return value


def replace_forward(module: nn.Module, run: Function) -> Callable[[], None]:
    """Let ``run(plain_forward, args, kwargs)`` answer calls of a module's forward. Return a function that undoes it."""
    if isinstance(module, torch.jit.ScriptModule):
        raise FormError(
            f"the forward of a {type(module).__name__} is compiled and cannot be replaced; use hooks"
        )
    stand_in = _Forward(module, run)
    vars(module)["forward"] = stand_in
    conceal([module])

    def take_off() -> None:
        stand_in.take_off()
        reveal([module])

    return take_off


def _run_around(module: nn.Module, around: _Around) -> Callable[[], None]:
    return replace_forward(module, lambda plain, args, kwargs: around.run(module, plain, args, kwargs))


@final
class ForwardWay(_Replacing):
    """Attach by replacing the forward of each module."""

    def _put_on(self, module: nn.Module, around: _Around) -> Callable[[], None]:
        return _run_around(module, around)


# -- way="wrap" ------------------------------------------------------------------------------------------------


class _Wrapper(Wrapper):
    """The methods that a wrapper adds to the class of the module that it holds."""

    __slots__ = ()
    _torchtap_around: _Around

    def __call__(self, *args: object, **kwargs: object) -> object:
        held = self._torchtap_held
        return self._torchtap_around.run(held, held, args, kwargs)

    # A property, since it has to win over a forward among the instance's own attributes.
    @property
    def forward(self) -> Function:
        held, around = self._torchtap_held, self._torchtap_around

        @functools.wraps(held.forward)
        def forward(*args: object, **kwargs: object) -> object:
            return around.run(held, held.forward, args, kwargs)

        return forward

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._torchtap_held.__class__

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return copy.deepcopy(self._torchtap_held, memo)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _itself, (self._torchtap_held,)


@functools.lru_cache(maxsize=512)
def _wrapper_class(held: type) -> type:
    slots = {"__slots__": ("_torchtap_around", "_torchtap_held"), "__doc__": held.__doc__}
    return type(held.__name__, (_Wrapper, held), {**slots, "__module__": held.__module__})


def _wrapper_of(module: nn.Module, around: _Around) -> Any:
    if isinstance(module, torch.jit.ScriptModule):
        raise FormError(f"a {type(module).__name__} is compiled and cannot be wrapped; use way='hook'")
    made_by: type = module.__class__  # of the innermost, where a wrapper is wrapped again
    wrapper: Any = object.__new__(_wrapper_class(made_by))
    object.__setattr__(wrapper, "__dict__", module.__dict__)
    _hold(wrapper, module)
    object.__setattr__(wrapper, "_torchtap_around", around)
    return wrapper


def _hold(wrapper: object, module: nn.Module) -> None:
    # Past nn.Module's own __setattr__, which would register the held module as a child of itself.
    object.__setattr__(wrapper, "_torchtap_held", module)


@final
class WrapWay(_Replacing):
    """Attach by replacing modules in their parents by wrappers that hold them."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root = root

    def _put_on(self, module: nn.Module, around: _Around) -> Callable[[], None]:
        if _same(module, self._root):
            return _run_around(module, around)
        wrappers: list[tuple[nn.Module, str, Any]] = []
        for parent in _modules_of(self._root):
            children = parent._modules
            for name, child in children.items():
                if child is not None and _same(child, module):
                    wrapper = _wrapper_of(child, around)
                    children[name] = wrapper
                    conceal([parent])
                    wrappers.append((parent, name, wrapper))
        if not wrappers:
            raise FormError(f"a {type(module).__name__} is in no module of this model and cannot be wrapped")
        return lambda: _put_back(wrappers)


def _same(left: nn.Module, right: nn.Module) -> bool:
    """Return True if two modules are the same, wrapped or not."""
    return left is right or left.__dict__ is right.__dict__


def _modules_of(root: nn.Module) -> list[nn.Module]:
    """Return every module once, also if some are wrapped."""
    found: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module.__dict__) not in found:
            found[id(module.__dict__)] = module
            waiting.extend(child for child in module._modules.values() if child is not None)
    return list(found.values())


def _put_back(wrappers: list[tuple[nn.Module, str, Any]]) -> None:
    for parent, name, wrapper in reversed(wrappers):
        reveal([parent])
        children: dict[str, Any] = parent._modules
        current: Any = children.get(name)
        if current is wrapper:
            children[name] = wrapper._torchtap_held
        # Another wrapper is around this one and stays.
        while current is not None and is_wrapper(current):
            if current._torchtap_held is wrapper:
                _hold(current, wrapper._torchtap_held)
                break
            current = current._torchtap_held


# -- the mode of a module ---------------------------------------------------------------------------------------


@final
class ModeHook:
    """Call a function when a module is switched to training or to evaluation.

    While there is a `ModeHook`, the module has its own ``train`` attribute, which calls the one that was there before.
    """

    def __init__(self, module: nn.Module, changed: Callable[[bool], object]) -> None:
        self._module, self._changed = module, changed
        self._switch: _Switch | None = None

    def put_on(self) -> None:
        """Start to call it."""
        attributes = self._module.__dict__
        switch = attributes.get(_TRAIN)
        if not isinstance(switch, _Switch):
            conceal([self._module])
            switch = attributes[_TRAIN] = _Switch(self._module, switch)
        switch.listeners.append(self._changed)
        self._switch = switch

    def take_off(self) -> None:
        """Stop. The last one restores the module."""
        switch, self._switch = self._switch, None
        if switch is None:
            return
        switch.listeners.remove(self._changed)
        if switch.listeners:
            return
        attributes, own = self._module.__dict__, switch.left()
        if attributes.get(_TRAIN) is switch:  # else the user has put another one around it
            del attributes[_TRAIN]
            attributes.update(own)
        reveal([self._module])


@final
class _Switch(Traveller):
    """A module's ``train`` that calls its listeners."""

    def __init__(self, module: nn.Module, own: Callable[[bool], Any] | None) -> None:
        self._module, self._own = module, own
        self.listeners: list[Callable[[bool], object]] = []

    def __call__(self, mode: bool = True) -> Any:
        switched = type(self._module).train(self._module, mode) if self._own is None else self._own(mode)
        for changed in tuple(self.listeners):
            changed(mode)
        return switched

    def left(self) -> dict[str, Any]:
        """Return the method that the user had put on the module."""
        return {} if self._own is None else {_TRAIN: self._own}
