"""A listener of trainings that does nothing: subclasses override the events that they need."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.optimizer import Optimizer

__all__ = ["Ears"]


class Ears:
    """A `TrainingListener` to begin from."""

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
