"""The statistics that stand for a tensor which was not kept, and the same of one that was."""

from __future__ import annotations

import math

import numpy as np

from torchtap.comparison.measure.values import Value

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
    "value": "value",  # of what is one number: a learning rate, a loss
}


def relative(mine: float, theirs: float, scale: float) -> float:
    """The distance of two numbers on a scale; infinite when one of them is no number or the scale is zero."""
    if mine == theirs:
        return 0.0
    difference = abs(theirs - mine)
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale else math.inf


def statistics_of(value: Value) -> dict[str, float]:
    """The statistics of a value as a run records them: of the finite numbers, of complex ones by their magnitude."""
    numbers = np.abs(value.array) if value.is_complex else value.array
    wide = numbers.reshape(-1).astype(np.float64)
    finite = wide[np.isfinite(wide)]
    found = {
        "count": float(wide.size),
        "nans": float(np.isnan(wide).sum()),
        "infs": float(np.isinf(wide).sum()),
        "l1": float(np.abs(finite).sum()),
        "l2": float(np.linalg.norm(finite)),
    }
    if not finite.size:
        return found | dict.fromkeys(("mean", "std", "min", "max", "absmax", "rms"), math.nan)
    return found | {
        "mean": float(finite.mean()),
        "std": float(finite.std(ddof=1)) if finite.size > 1 else math.nan,
        "min": float(finite.min()),
        "max": float(finite.max()),
        "absmax": float(np.abs(finite).max()),
        "rms": found["l2"] / math.sqrt(finite.size),
    }
