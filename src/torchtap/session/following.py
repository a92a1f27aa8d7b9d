"""Optimizers as the clock: a step is over when each of the optimizers that are followed has stepped.

A gradient scaler that leaves an update out ends a step too. Of several closure calls or updates inside one step none
makes a step of its own. `Sentry` notices passes of the model in steps in which no tap is live, and mode switches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from torchtap.errors import SessionError
from torchtap.forms.op.passes import PassHooks
from torchtap.hooks.replace import ModeHook
from torchtap.receive.ears import Ears
from torchtap.receive.training import innermost, listen, stop_listening

__all__ = ["Following", "Sentry"]

_PATIENCE = 128  # updates of one optimizer that wait for another's


@final
class Following(Ears):
    """Tells when each of the followed optimizers has stepped. A `TrainingListener`.

    ``sentry`` is at work for as long as anybody is followed.
    """

    def __init__(
        self, step_is_over: Callable[[bool], None], hears: Callable[[], bool], sentry: Sentry
    ) -> None:
        self.sentry = sentry
        self._step_is_over = step_is_over
        self._hears = hears
        self._followed: dict[int, Optimizer] = {}
        self._updates: dict[int, int] = {}  # since the step began, by the optimizer's id
        self._left_out = False

    def __bool__(self) -> bool:
        return bool(self._followed)

    def add(self, optimizers: Sequence[object]) -> None:
        """Follow these too."""
        found: list[Optimizer] = []
        for each in optimizers:
            inside = innermost(each)
            if not inside:
                raise SessionError(
                    f"follow({each!r}): give a torch.optim.Optimizer, or what a framework wraps around one; "
                    "its updates end the steps"
                )
            found += inside
        if not found:
            raise SessionError("follow(): give at least one optimizer, whose updates end the steps")
        if not self._followed:
            listen(self, clock=True)
        self._followed.update({id(each): each for each in found})

    def stop(self) -> None:
        """Follow nobody any more."""
        stop_listening(self)
        self._followed.clear()
        self.sentry.stop()

    def updated(self, optimizer: Optimizer) -> None:
        self._count(optimizer)

    def skipped(self, optimizer: Optimizer) -> None:
        self._count(optimizer, skipped=True)

    def _count(self, optimizer: Optimizer, *, skipped: bool = False) -> None:
        if id(optimizer) not in self._followed or not self._hears():
            return
        self._left_out |= skipped
        updates = self._updates
        updates[id(optimizer)] = updates.get(id(optimizer), 0) + 1
        if len(updates) == len(self._followed) or updates[id(optimizer)] >= _PATIENCE:
            left_out, self._left_out = self._left_out, False
            updates.clear()
            self._step_is_over(left_out)


@final
class Sentry:
    """Looks out for passes and mode switches where no tap is on the model."""

    def __init__(
        self,
        models: Sequence[object],
        on_pass: Callable[[str, bool], object],
        on_mode: Callable[[bool], None],
    ) -> None:
        self._on_pass = on_pass
        self._models = models
        modules = [model for model in models if isinstance(model, nn.Module)]
        self._passes = [PassHooks(model, self) for model in modules]
        self._modes = [ModeHook(model, on_mode) for model in modules]
        self._looks_for_passes = self._looks_for_modes = False

    def sees_gradients(self) -> bool:
        """Whether any parameter has a gradient already."""
        return any(map(_has_gradient, self._models))

    def look_for_passes(self, wanted: bool) -> None:
        """Whether passes are to be told."""
        if wanted != self._looks_for_passes:
            self._looks_for_passes = wanted
            for hooks in self._passes:
                hooks.switch_on() if wanted else hooks.switch_off()

    def look_for_modes(self) -> None:
        """Tell from now on when the model goes to evaluation and back."""
        if not self._looks_for_modes:
            self._looks_for_modes = True
            for hook in self._modes:
                hook.put_on()

    def stop(self) -> None:
        """Leave the model as it was."""
        self.look_for_passes(False)
        if self._looks_for_modes:
            self._looks_for_modes = False
            for hook in self._modes:
                hook.take_off()

    def begin_pass(self, training: bool | None = None) -> None:
        learning = torch.is_grad_enabled()
        self._on_pass("train" if training is not False and learning else "eval", learning)

    def end_pass(self) -> None:
        pass


def _has_gradient(model: object) -> bool:
    parameters: Callable[[], Any] = getattr(model, "parameters", lambda: ())
    return any(parameter.grad is not None for parameter in parameters())
