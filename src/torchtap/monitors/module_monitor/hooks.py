"""Forward hooks on modules: put on together, rest together, and dead in every copy of the model.

It guarantees:
- a copy or a pickle of a model with these hooks on carries none of them;
- resting hooks are on no module, and come back all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import nn

from torchtap.hooks.ways import Handle, HookWay

__all__ = ["HooksManager"]


class HooksManager:
    """Forward hooks by module, at most one for each. Leaving the block, or deleting it, takes them off."""

    def __init__(self) -> None:
        self.hooks: dict[nn.Module, Handle] = {}
        self._functions: dict[nn.Module, tuple[Callable[..., object], bool]] = {}
        self._way = HookWay()
        self._resting = False

    def register_forward_hook(self, module: nn.Module, hook_fn: Callable[..., object]) -> None:
        """Put a hook on a module, in place of the one it has from here, if any."""
        self.put_on(module, hook_fn)

    def put_on(self, module: nn.Module, hook_fn: Callable[..., object], *, with_kwargs: bool = False) -> None:
        """The same for a hook that may ask for the call's keywords."""
        self.remove_hook(module)
        self._functions[module] = (hook_fn, with_kwargs)
        self.hooks[module] = self._way.after(module, hook_fn, with_kwargs=with_kwargs)
        if self._resting:
            self.hooks[module].remove()

    def remove_hook(self, module: nn.Module) -> None:
        """Take a module's hook off; nothing happens where there is none."""
        if module in self.hooks:
            self.hooks.pop(module).remove()
            del self._functions[module]

    def remove_all_hooks(self) -> None:
        """Take every hook off."""
        for module in list(self.hooks):
            self.remove_hook(module)

    def rest(self, resting: bool) -> None:
        """Take the hooks off, or put them back; meanwhile they stay listed."""
        if resting == self._resting:
            return
        self._resting = resting
        for module, (function, with_kwargs) in self._functions.items():
            if resting:
                self.hooks[module].remove()
            else:
                self.hooks[module] = self._way.after(module, function, with_kwargs=with_kwargs)

    def __len__(self) -> int:
        return len(self.hooks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_all_hooks()

    def __del__(self) -> None:
        self.remove_all_hooks()
