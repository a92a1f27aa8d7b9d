"""A pace: how often a ready-made plan records, so that it takes no more than its share of a training's time.

Steps that record are compared with their quiet neighbours. The extra time is a debt: the next recorded step waits
until the share of the time that has passed covers it. The first steps of a process take longer for reasons of their
own, such as a compiler; a step recorded there is charged as much as later ones. If the usual extra time, spread over
the interval, is more than the share, the interval grows; it never shrinks, so that steps stay easy to find. The first
steps of a training tell most: a pace may have all of them recorded, outside the share. An evaluation belongs to the
step that ended last: one that is made before step 10, or after ten steps, belongs to step 9. So the step before a
live one is live for evaluations too.
"""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median
from typing import final

from torchtap.schedule.base import Moment

__all__ = ["Pace", "Seldom"]

_WARM_UP = 2  # first steps take longer for reasons of their own
_REMEMBERED = 15
_ANSWERS = 8  # an evaluation is asked about after its step, a turn of several optimizers before it


@final
class Pace:
    """A predicate for a tap: live every ``every`` steps, more seldom where recording is dear.

    ``dense``: so many steps at the beginning are all live. ``evaluations``: whether the step before a live one is live
    for them.
    """

    def __init__(self, every: int, share: float | None, dense: int = 0, *, evaluations: bool = True) -> None:
        self.every = every
        self._evaluations = evaluations
        self._dense = dense
        self._first: int | None = None
        self._share = share
        self._quiet: deque[float] = deque(maxlen=_REMEMBERED)
        self._live: deque[float] = deque(maxlen=_REMEMBERED)
        self._began: tuple[int, bool, float] | None = None  # step, whether it is live, when it began
        self._next = 0
        self._passed = 0.0  # seconds of all steps
        self._recorded = 0  # steps, but for dense ones
        self._answers: dict[int, bool] = {}  # of the newest steps

    def __call__(self, moment: Moment) -> bool:
        """Whether this step is to be recorded. The same step gets the same answer."""
        live = self._trains(moment.step)
        evaluated = self._evaluations and moment.phase != "train"
        return live or (evaluated and moment.step + 1 >= self._next)

    def _trains(self, step: int) -> bool:
        known = self._answers.get(step)
        if known is None and self._began is not None and step < self._began[0]:
            return False  # long over
        if known is not None:
            return known
        self._note(step)
        if self._first is None:
            self._first = step
        live = step >= self._next or self.is_dense(step)
        if live:
            self._next = step + self.every
        self._answers[step] = live
        if len(self._answers) > _ANSWERS:
            del self._answers[min(self._answers)]
        self._began = (step, live, time.perf_counter())
        return live

    def is_dense(self, step: int) -> bool:
        """Whether a step is one of the first ones, which are all live."""
        return self.since_first(step) < self._dense

    def since_first(self, step: int) -> int:
        """How many steps after the first one it was asked about."""
        return 0 if self._first is None else step - self._first

    def _note(self, step: int) -> None:
        """Add the time of a step that has ended to those of its sort."""
        if self._began is None or step != self._began[0] + 1:
            return
        was, live, began = self._began
        seconds = time.perf_counter() - began
        self._passed += seconds
        self._recorded += live and not self.is_dense(was)
        if was >= _WARM_UP:
            (self._live if live else self._quiet).append(seconds)
        if live:
            self._widen()
        if self._share is not None and self._live and self._quiet:
            self._settle(step)

    def _settle(self, step: int) -> None:
        """Put the next recorded step off until the share covers the extra time so far."""
        usual = median(self._quiet)
        extra = self._recorded * (median(self._live) - usual)
        if usual > 0:
            self._next = max(
                self._next, step + math.ceil((extra / (self._share or 1) - self._passed) / usual)
            )

    def _widen(self) -> None:
        if self._share is None or len(self._live) < 2 or len(self._quiet) < 2:
            return
        usual = median(self._quiet)
        extra = median(self._live) - usual
        needed = math.ceil(extra / (usual * self._share)) if usual > 0 else 1
        if needed > self.every:
            self.every = needed
            self._next = max(self._next, (self._began[0] if self._began else 0) + needed)

    def __repr__(self) -> str:
        return f"Pace(every={self.every})"


@final
class Seldom:
    """A predicate for what is dear: live with a pace, but of its dense steps, after the first few, one in so many."""

    def __init__(self, pace: Pace, one_in: int, all_of: int = 4) -> None:
        self._pace = pace
        self._one_in = one_in
        self._all_of = all_of

    def __call__(self, moment: Moment) -> bool:
        """Whether this step is to be recorded. The same for all phases of a step."""
        if not self._pace(moment):
            return False
        after = self._pace.since_first(moment.step) - self._all_of
        return not self._pace.is_dense(moment.step) or after < 0 or after % self._one_in == self._one_in - 1
