"""Three ways to run a function before and after a module's call.

``hook`` uses torch's own hooks and is the default; ``wrap`` and ``forward`` (`wrap`) are for code that goes past
``__call__`` or that treats modules with hooks in another way. All three hand over the same values, and all three take
back what a function returns: other arguments, another output, or None for no change.

No other file registers forward hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, final, get_args

from torch import nn

from torchtap.errors import PlanError
from torchtap.hooks.hooks import Hooks, RegisteredHook, hook_entries
from torchtap.hooks.untraced import Hook

__all__ = ["Action", "Handle", "Hook", "HookWay", "Way", "WayName", "each_end", "way_for"]

WayName = Literal["hook", "wrap", "forward"]
# Before a call it gets (module, args, kwargs), after it (module, args, output), with the keywords if asked for.
Action: TypeAlias = Callable[..., Any]
# A class may have its own way to take hooks.
_REGISTER_BEFORE = nn.Module.register_forward_pre_hook
_REGISTER_AFTER = nn.Module.register_forward_hook
# Where torch notes how it is to call a hook.
_ALWAYS = ("_forward_hooks_always_called",)
_WITH_KWARGS = ("_forward_hooks_with_kwargs",)
_GIVEN_KWARGS = ("_forward_pre_hooks_with_kwargs",)


class Handle(Protocol):
    """Takes off again what was put on."""

    def remove(self) -> None:
        """Take it off; a second time does nothing."""


class Way(Protocol):
    """One way to put functions around modules' calls."""

    def before(self, module: nn.Module, action: Action, *, first: bool = False) -> Handle:
        """Run ``action`` before each call; ``first`` puts it ahead of others."""

    def after(self, module: nn.Module, action: Action, *, always: bool = False) -> Handle:
        """Run ``action`` after each call; ``always`` runs it also when the call raised, with output None."""

    def around(self, module: nn.Module, begin: Action, end: Action) -> list[Handle]:
        """Run ``begin`` ahead of all that comes before a call, and ``end`` after it, also when the call raised."""


def way_for(root: nn.Module, name: str) -> Way:
    """The way of a name; ``root`` is the model that all modules belong to."""
    if name == "hook":
        return _HOOKS
    if name not in get_args(WayName):
        raise PlanError(f"way={name!r}: a tap is put on by {', '.join(map(repr, get_args(WayName)))}")
    from torchtap.hooks.wrap import ForwardWay, WrapWay

    return WrapWay(root) if name == "wrap" else ForwardWay()


def each_end(way: Way, module: nn.Module, begin: Action, end: Action) -> list[Handle]:
    """`Way.around` where the two ends are put on one by one."""
    return [way.before(module, begin, first=True), way.after(module, end, always=True)]


@final
class HookWay:
    """torch's own hooks. ``travelling`` ones are put on as they are, for tracers to read and copies to take along."""

    def __init__(self, *, travelling: bool = False) -> None:
        self._travelling = travelling

    def _hook(self, action: Action) -> Action:
        return action if self._travelling or type(action) is Hook else Hook(action)

    def before(self, module: nn.Module, action: Action, *, first: bool = False) -> Handle:
        hook = self._hook(action)
        if type(module).register_forward_pre_hook is _REGISTER_BEFORE:
            return Hooks(hook_entries(module, "_forward_pre_hooks", hook, _GIVEN_KWARGS, first=first))
        return RegisteredHook(module, module.register_forward_pre_hook(hook, prepend=first, with_kwargs=True))

    def after(
        self, module: nn.Module, action: Action, *, always: bool = False, with_kwargs: bool = False
    ) -> Handle:
        hook = self._hook(action)
        if type(module).register_forward_hook is _REGISTER_AFTER:
            notes = _ALWAYS * always + _WITH_KWARGS * with_kwargs
            return Hooks(hook_entries(module, "_forward_hooks", hook, notes))
        return RegisteredHook(
            module, module.register_forward_hook(hook, always_call=always, with_kwargs=with_kwargs)
        )

    def around(self, module: nn.Module, begin: Action, end: Action) -> list[Handle]:
        own = type(module)
        if (own.register_forward_pre_hook, own.register_forward_hook) != (_REGISTER_BEFORE, _REGISTER_AFTER):
            return each_end(self, module, begin, end)
        first = hook_entries(module, "_forward_pre_hooks", self._hook(begin), _GIVEN_KWARGS, first=True)
        last = hook_entries(module, "_forward_hooks", self._hook(end), _ALWAYS)
        return [Hooks([*first, *last])]


_HOOKS = HookWay()
