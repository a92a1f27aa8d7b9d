"""The loss of a step: the sum of what ``backward()`` was called on in it, since the optimizer uses its gradient."""

from __future__ import annotations

from typing import final

from torch import Tensor

from torchtap.session.watching import Watch

__all__ = ["StepLoss"]


@final
class StepLoss:
    """Logs the loss of each step of a watch."""

    def __init__(self) -> None:
        self._step = -1
        self._sum: Tensor | None = None

    def add(self, watch: Watch, loss: Tensor) -> None:
        """Log the sum of this step's losses so far."""
        step = watch.step_number
        self._sum = loss.float() if step != self._step or self._sum is None else self._sum + loss.float()
        self._step = step
        watch.log(loss=self._sum)
