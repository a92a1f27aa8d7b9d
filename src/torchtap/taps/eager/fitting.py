"""The ways of getting around a module's call: how a function of ours comes to run before and after it.

``hook`` uses torch's own hooks and is the default; ``wrap`` and ``forward`` (`wrap`) are for code that goes past
``__call__`` or that treats modules with hooks in another way. All three hand over the same values.

A function put before a call gets ``(module, args, kwargs)``, one put after it ``(module, args, output)``. What
it returns is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, final, get_args

from torch import nn

from torchtap.errors import PlanError

__all__ = ["Action", "Fitting", "Handle", "Hook", "HookFitting", "Via", "fitting_for"]

Via = Literal["hook", "wrap", "forward"]
Action: TypeAlias = Callable[..., None]


class Handle(Protocol):
    """Takes off again what was put on."""

    def remove(self) -> None:
        """Take it off; a second time does nothing."""


class Fitting(Protocol):
    """One way of putting functions around modules' calls."""

    def before(self, module: nn.Module, action: Action, *, first: bool = False) -> Handle:
        """Run ``action`` before each call; ``first`` puts it ahead of others."""

    def after(self, module: nn.Module, action: Action, *, always: bool = False) -> Handle:
        """Run ``action`` after each call; ``always`` runs it also when the call raised, with output None."""


def fitting_for(root: nn.Module, via: str) -> Fitting:
    """The fitting that goes by a name; ``root`` is the model that all modules belong to."""
    if via == "hook":
        return HookFitting()
    if via not in get_args(Via):
        raise PlanError(f"via={via!r}: a tap is put on by {', '.join(map(repr, get_args(Via)))}")
    from torchtap.taps.eager.wrap import ForwardFitting, WrapFitting

    return WrapFitting(root) if via == "wrap" else ForwardFitting()


def _inert(*_: Any) -> None:
    """What a hook of ours becomes in a copy or a pickle of the model."""


@final
class Hook(partial[Any]):
    """A hook that calls a function of ours and does nothing in a copy of the model.

    A ``partial`` without arguments, because that adds next to nothing to the call.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Hook, "_nothing")

    def __deepcopy__(self, memo: Any) -> Action:
        return _inert

    _nothing = staticmethod(_inert)


@final
class HookFitting:
    """torch's own hooks."""

    def before(self, module: nn.Module, action: Action, *, first: bool = False) -> Handle:
        return module.register_forward_pre_hook(Hook(action), prepend=first, with_kwargs=True)

    def after(self, module: nn.Module, action: Action, *, always: bool = False) -> Handle:
        return module.register_forward_hook(Hook(action), always_call=always)
