"""The losses of a process: what each ``backward()`` is called on, unscaled where a gradient scaler has scaled it.

The loss of an update is the sum over the backward calls since the update before: the optimizer uses the gradient of
that sum. Micro-batches whose losses are divided by their number so add up to the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtap.receive import backward, training
from torchtap.receive.ears import StepListener

__all__ = ["LossCatcher", "UpdateLosses"]


@final
class LossCatcher:
    """Call ``tell`` with the loss whenever a backward pass of a single number begins."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        self.tell = tell

    def start(self) -> None:
        """Begin."""
        backward.listen(self)

    def stop(self) -> None:
        """Stop; a second time does nothing."""
        backward.stop_listening(self)

    def backward_begins(self, loss: Tensor | None, root: Tensor | None) -> None:
        if loss is not None:
            self.tell(loss)

    def backward_ends(self) -> None:
        pass


@final
class UpdateLosses(StepListener):
    """Call ``add`` with each loss, and ``done`` with an optimizer and the sum that its update used."""

    def __init__(self, add: Callable[[Tensor], None], done: Callable[[Optimizer, Tensor], None]) -> None:
        self._add, self._done = add, done
        self._sum: Tensor | None = None
        self._losses = LossCatcher(self._on_loss)
        self._runs = False

    def start(self) -> None:
        """Begin; a second time does nothing."""
        if not self._runs:
            self._runs = True
            self._losses.start()
            training.listen(self)

    def stop(self) -> None:
        """Stop; a second time does nothing."""
        self._runs = False
        self._losses.stop()
        training.stop_listening(self)

    def _on_loss(self, loss: Tensor) -> None:
        self._sum = loss.float() if self._sum is None else self._sum + loss.float()
        self._add(loss)

    def updated(self, optimizer: Optimizer) -> None:
        total, self._sum = self._sum, None
        if total is not None:
            self._done(optimizer, total)

    def skipped(self, optimizer: Optimizer) -> None:
        self.updated(optimizer)
