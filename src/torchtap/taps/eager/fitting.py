"""The ways of getting around a module's call: how a function of ours comes to run before and after it.

``hook`` uses torch's own hooks and is the default; ``wrap`` and ``forward`` (`wrap`) are for code that goes past
``__call__`` or that treats modules with hooks in another way. All three hand over the same values.

A function put before a call gets ``(module, args, kwargs)``, one put after it ``(module, args, output)``. What
it returns is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, final, get_args

from torch import nn

from torchtap.errors import PlanError
from torchtap.taps.eager.untraced import Hook, hook_after, hook_before

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


@final
class HookFitting:
    """torch's own hooks."""

    def before(self, module: nn.Module, action: Action, *, first: bool = False) -> Handle:
        return hook_before(module, action, first=first)

    def after(self, module: nn.Module, action: Action, *, always: bool = False) -> Handle:
        return hook_after(module, action, always=always)
