"""The base class of step listeners: every method is a no-op."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.optimizer import Optimizer

__all__ = ["Ears", "StepListener"]


class StepListener:
    """Receive the events of a training loop. Override the methods for the events that you need."""

    def entered(self, optimizer: Optimizer) -> None:
        pass

    def evaluating(self, optimizer: Optimizer) -> None:
        pass

    def unscaling(self, optimizer: Optimizer) -> None:
        pass

    def clipping(self, gradients: Sequence[Tensor]) -> None:
        pass

    def ready(self, optimizer: Optimizer) -> None:
        pass

    def updated(self, optimizer: Optimizer) -> None:
        pass

    def skipped(self, optimizer: Optimizer) -> None:
        pass


Ears = StepListener
