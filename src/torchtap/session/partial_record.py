"""A step's record while some of its numbers are still on their way from a device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import final

from torchtap.receive.collect import PendingNumbers
from torchtap.schedule.base import Moment
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem

__all__ = ["PartialRecord"]


@final
@dataclass(slots=True)
class PartialRecord:
    """A record in the making."""

    moment: Moment
    passes: int
    skipped: bool
    scalars: tuple[ScalarBlock, ...]
    tensors: tuple[TensorItem, ...]
    coming: list[PendingNumbers]

    @property
    def whole(self) -> bool:
        """Whether all numbers are there."""
        return not self.coming or all(each.done() for each in self.coming)

    def record(self) -> StepRecord:
        """The record, whole. Waits for the numbers that are not there yet."""
        for each in self.coming:
            each.fill()
        moment = self.moment
        return StepRecord(
            moment.step,
            moment.epoch,
            moment.batch,
            moment.phase,
            time.time(),
            self.scalars,
            self.tensors,
            self.passes,
            self.skipped,
        )
