"""Tell when a module is switched to training or to evaluation.

While anybody listens, the module has a ``train`` of torchtap's among its attributes. It calls what was there before,
the class's method or one that the user put on the module. That stays when the last listener has gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn

from torchtap.hooks.untraced import Traveller, conceal, reveal

__all__ = ["ModeHook"]

_TRAIN = "train"


@final
class ModeHook:
    """One listener of one module."""

    def __init__(self, module: nn.Module, told: Callable[[bool], object]) -> None:
        self._module, self._told = module, told
        self._switch: _Switch | None = None

    def put_on(self) -> None:
        """From now on it tells."""
        attributes = self._module.__dict__
        switch = attributes.get(_TRAIN)
        if not isinstance(switch, _Switch):
            conceal(self._module)
            switch = attributes[_TRAIN] = _Switch(self._module, switch)
        switch.listeners.append(self._told)
        self._switch = switch

    def take_off(self) -> None:
        """It tells no more, and without other listeners the module is as it was."""
        switch, self._switch = self._switch, None
        if switch is None:
            return
        switch.listeners.remove(self._told)
        if switch.listeners:
            return
        attributes, own = self._module.__dict__, switch.left()
        if attributes.get(_TRAIN) is switch:  # else the user has put another one around it
            del attributes[_TRAIN]
            attributes.update(own)
        reveal(self._module)


@final
class _Switch(Traveller):
    """A module's ``train`` that tells its listeners."""

    def __init__(self, module: nn.Module, own: Callable[[bool], Any] | None) -> None:
        self._module, self._own = module, own
        self.listeners: list[Callable[[bool], object]] = []

    def __call__(self, mode: bool = True) -> Any:
        switched = type(self._module).train(self._module, mode) if self._own is None else self._own(mode)
        for told in tuple(self.listeners):
            told(mode)
        return switched

    def left(self) -> dict[str, Any]:
        """The method that the user had put on the module."""
        return {} if self._own is None else {_TRAIN: self._own}
