"""Steps in which nothing is asked of the model: they are counted, and nothing else is done.

Most steps of most trainings are such. What is not run need not be fetched from memory either, and after a step of the
model nothing of ours is left in the processor's caches: that, not the work, is what such a step would cost.

Whoever moves the clock or has something to record catches up first (`StepMaker.catch_up`), also from another thread:
between what is looked at and what is set here no call is made, so the interpreter does not go over to it in between.
"""

from __future__ import annotations

from typing import final

__all__ = ["Lull"]


@final
class Lull:
    """The numbers of the steps that go by; -1 for none."""

    __slots__ = ("in_block", "last", "open", "until")

    def __init__(self) -> None:
        self.in_block = False  # whether the open step is a block's, also outside of a lull
        self.until = -1  # the step before which nothing is asked for
        self.open = -1
        self.last = -1  # that ended last

    @property
    def holds_any(self) -> bool:
        """Whether steps were counted that nobody else knows of."""
        return self.open >= 0 or self.last >= 0

    @property
    def newest(self) -> int:
        """The step that is open, or the one that ended last."""
        return max(self.open, self.last)

    def goes_on(self, step: int | None = None) -> bool:
        """The open step ends and the next one begins, or the one with this number. False: not in a lull."""
        if step is not None and type(step) is not int:
            return False
        now = self.open
        following = now + 1 if step is None else step
        if now < 0 or not now < following < self.until:
            return False
        self.last, self.open = now, following
        return True
