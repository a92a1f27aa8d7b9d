"""The step clock of a watched training: where it stands, and which moves are allowed. Pure state, no hooks.

A **pass** is one call of the model. A **step** is what the optimizer ends, or a block, or the next number that is
set; it holds passes. A **phase** says what a pass serves: ``train``, ``eval`` or what the user named.
"""

from __future__ import annotations

from typing import final

from torchtap.errors import SessionError
from torchtap.schedule.base import Moment

__all__ = ["Clock"]


@final
class Clock:
    """Counts steps. A step has a number that only grows; epoch and batch are whatever the training says."""

    def __init__(self, first: int = 0) -> None:
        self.step = first - 1  # the one that began last
        self._began = False
        self.epoch: int | None = None
        self.batch: int | None = None
        self._stands: Moment | None = None  # the newest answer: a step that is asked about comes most often

    @property
    def following(self) -> int:
        """The step that comes next if nobody says otherwise."""
        return self.step + 1

    def start_at(self, step: int) -> None:
        """The next step gets this number."""
        self.step = _whole(step, "start") - 1

    def next_step(self, step: int | None = None) -> None:
        """On to the next step, or to a given one."""
        following = self.step + 1 if step is None else _whole(step, "step")
        if following <= self.step and self._began:  # the first may have any number
            raise SessionError(
                f"step {following} was asked for after step {self.step}: steps only grow; "
                "a second training needs a watch of its own"
            )
        self.step = following
        self._began = True

    def set_epoch(self, epoch: int) -> None:
        """A new epoch begins; its batches are counted anew."""
        self.epoch = _whole(epoch, "epoch")
        self.batch = None

    def set_batch(self, batch: int) -> None:
        """The batch of the step that begins."""
        self.batch = _whole(batch, "batch")

    def coming(self, step: int | None) -> Moment:
        """Where it will stand after `next_step`."""
        self._stands = Moment(self.step + 1 if step is None else _whole(step, "step"), self.epoch, self.batch)
        return self._stands

    def moment(self, phase: str = "train") -> Moment:
        """Where the clock stands."""
        known = self._stands
        if (
            known is not None
            and known.step == self.step
            and known.phase == phase
            and known.epoch == self.epoch
            and known.batch == self.batch
        ):
            return known
        return Moment(self.step, self.epoch, self.batch, phase)


def _whole(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SessionError(f"{what} {value!r}: a {what} is a whole number from 0 on")
    return value
