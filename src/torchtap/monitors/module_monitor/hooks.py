"""Forward hooks on modules: put on together, paused together, and dead in every copy of the model.

It guarantees:
- a deep copy or a pickle of a model with these hooks on carries hooks that do nothing;
- ``pause`` leaves no hook on any module, ``resume`` puts all of them back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self

from torch import nn

from torchtap.taps.walk.ways import HookWay

__all__ = ["HooksManager", "LiveHook"]

_AS_GIVEN = HookWay(travelling=True)


# What a hook of ours becomes in a copy or a pickle of the model: it takes anything and does nothing. It is from
# the standard library, so that the pickle can be read where there is no torchtap.
_idle = contextlib.nullcontext()


class LiveHook:
    """A hook that is alive only on the module that it was put on."""

    def __init__(self, action: Callable[..., None]) -> None:
        self._action = action

    def __call__(self, *arguments: Any) -> None:
        self._action(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (_idle, "__exit__")

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _idle.__exit__


class HooksManager:
    """Forward hooks by module, at most one for each. Leaving the block, or deleting it, takes them off."""

    def __init__(self) -> None:
        self.hooks: dict[nn.Module, Any] = {}
        self._functions: dict[nn.Module, tuple[Callable[..., Any], bool]] = {}
        self._paused = False

    def register_forward_hook(
        self, module: nn.Module, hook_fn: Callable[..., Any], *, with_kwargs: bool = False
    ) -> None:
        """Put a hook on a module, in place of the one it has from here, if any."""
        if module in self.hooks:
            self.hooks[module].remove()
        self._functions[module] = (hook_fn, with_kwargs)
        self.hooks[module] = _AS_GIVEN.after(module, hook_fn, with_kwargs=with_kwargs)
        if self._paused:
            self.hooks[module].remove()

    def remove_hook(self, module: nn.Module) -> None:
        """Take a module's hook off; nothing happens where there is none."""
        if module in self.hooks:
            self.hooks.pop(module).remove()
            del self._functions[module]

    def remove_all_hooks(self) -> None:
        """Take every hook off."""
        for handle in self.hooks.values():
            handle.remove()
        self.hooks.clear()
        self._functions.clear()

    def pause(self) -> None:
        """Take the hooks off until `resume`; they stay listed."""
        if not self._paused:
            self._paused = True
            for handle in self.hooks.values():
                handle.remove()

    def resume(self) -> None:
        """Put the hooks back."""
        if self._paused:
            self._paused = False
            for module, (function, with_kwargs) in self._functions.items():
                self.hooks[module] = _AS_GIVEN.after(module, function, with_kwargs=with_kwargs)

    def __len__(self) -> int:
        return len(self.hooks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_all_hooks()

    def __del__(self) -> None:
        self.remove_all_hooks()
