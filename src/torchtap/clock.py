"""The step clock of a watched training: where it stands, and which moves are allowed. Pure state, no hooks."""

from __future__ import annotations

from typing import final

from torchtap.errors import SessionError
from torchtap.schedule import Moment

__all__ = ["Clock"]


@final
class Clock:
    """Counts steps. A step has a number that only grows; epoch and batch are whatever the training says."""

    def __init__(self) -> None:
        self.step = -1
        self.epoch: int | None = None
        self.batch: int | None = None

    def next_step(self, step: int | None = None) -> None:
        """On to the next step, or to a given one."""
        following = self.step + 1 if step is None else _whole(step, "step")
        if following <= self.step:
            raise SessionError(
                f"step {following} was asked for after step {self.step}: steps only grow; "
                "a second training needs a watch of its own"
            )
        self.step = following

    def set_epoch(self, epoch: int) -> None:
        """A new epoch begins; its batches are counted anew."""
        self.epoch = _whole(epoch, "epoch")
        self.batch = None

    def set_batch(self, batch: int) -> None:
        """The batch of the step that begins."""
        self.batch = _whole(batch, "batch")

    def moment(self, phase: str) -> Moment:
        """Where the clock stands."""
        return Moment(self.step, self.epoch, self.batch, phase)


def _whole(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SessionError(f"{what} {value!r}: a {what} is a whole number from 0 on")
    return value
