"""The statistics that stand for a tensor which was not kept, and the same of one that was."""

from __future__ import annotations

import math

from torch import Tensor

from torchtap.comparison.measure.chunks import as_real
from torchtap.reduce.stats import Stats

__all__ = ["STATISTICS", "relative", "statistics_of"]

# A statistic sums over many elements, so it is steadier than the elements; each is measured by its own scale.
STATISTICS = {
    "l2": "l2",
    "rms": "rms",
    "std": "rms",
    "absmax": "absmax",
    "mean": "rms",
    "min": "absmax",
    "max": "absmax",
    "l1": "l1",
}


def relative(mine: float, theirs: float, scale: float) -> float:
    """The distance of two numbers on a scale; infinite when one of them is no number or the scale is zero."""
    if mine == theirs:
        return 0.0
    difference = abs(theirs - mine)
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale else math.inf


def statistics_of(value: Tensor) -> dict[str, float]:
    """The statistics of a tensor as a run records them."""
    reduction = Stats()
    numbers = reduction.result(reduction.update(None, as_real(value)))
    return {name: float(number) for name, number in numbers.items()}
