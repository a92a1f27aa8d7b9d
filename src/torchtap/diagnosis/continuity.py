"""Whether a weight is what its update left: what came in between is told by a projection, which is linear.

The projection of a weight plus that of its update is the projection of the next step's weight, up to rounding. Where
it is not, something else than the optimizer has changed the weight: a loader, an average, a fault of memory. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import Chart
from torchtap.plan.names import read_name, site_name

__all__ = ["Course", "course_of", "jumped"]

_ROUNDING = 1e-5  # of a weight's size
_OF_UPDATE = 1e-2  # of an update's, which may be kept in few bits
Numbers = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """One weight on one rank: at each kept step what it was to be, what it is, and how far rounding takes it."""

    steps: npt.NDArray[np.int64]
    expected: Numbers  # NaN where the step before was not recorded
    found: Numbers
    slack: Numbers

    @property
    def jumps(self) -> npt.NDArray[np.bool_]:
        """The steps before which something else has changed it."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(self.found - self.expected) > self.slack, np.bool_)


def course_of(chart: Chart, site: str) -> Course | None:
    """The course of a parameter; None where its projections were not recorded."""
    module, _, leaf, _ = read_name(site)
    change = site_name(module, "update", leaf)
    rows = [
        _row(chart, each, statistic)
        for each, statistic in ((site, "projection"), (change, "projection"), (site, "l2"), (change, "l2"))
    ]
    if any(row is None for row in rows):
        return None
    weight, update, size, moved = (np.asarray(row) for row in rows)
    steps = chart.steps
    after = np.diff(steps, prepend=steps[:1] - 2) == 1
    with np.errstate(invalid="ignore"):
        expected = np.where(after, np.roll(weight + update, 1), np.nan)
        slack = _ROUNDING * np.maximum(size, np.roll(size, 1)) + _OF_UPDATE * np.roll(moved, 1)
    return Course(steps, expected, weight, slack)


def jumped(chart: Chart, site: str, step: int) -> bool:
    """Whether something else than the optimizer changed a parameter just before a step."""
    course = course_of(chart, site)
    if course is None:
        return False
    column = int(np.searchsorted(course.steps, step))
    return bool(course.jumps[column])


def _row(chart: Chart, site: str, statistic: str) -> Numbers | None:
    """A statistic of a site at every kept step, NaN where it was not recorded."""
    steps, values = chart.series(site, statistic)
    if not len(steps):
        return None
    row = np.full(len(chart.steps), np.nan)
    row[np.searchsorted(chart.steps, steps)] = values
    return row
