"""Numbers of several parts folded into those of the whole, for many sites and steps at once. Numpy only.

The twelve statistics fold exactly, up to float64 rounding: counts, sums and extremes by themselves, moments by way of
their counts. Parts come one after the other, so that memory does not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, final

import numpy as np
import numpy.typing as npt

__all__ = ["SUMS", "How", "RankFold", "needed", "way_of"]

How = Literal["moments", "sum", "min", "max", "mean", "quantile", "own"]
Numbers = npt.NDArray[np.float64]
Columns = Mapping[str, Numbers]

SUMS = ("count", "nans", "infs", "l1", "underflow", "overflow", "rows")
_COUNTS = ("count", "nans", "infs")
_MOMENTS: dict[str, tuple[str, ...]] = {
    "mean": (*_COUNTS, "mean"),
    "std": (*_COUNTS, "mean", "std"),
    "l2": ("count", "l2"),
    "rms": (*_COUNTS, "l2"),
    "zeros": ("count", "zeros"),
    "ratio": ("ratio", "weight_l2"),  # of an update to its parameter
}
_ENDS: dict[str, How] = {"min": "min", "max": "max", "absmax": "max"}


def way_of(statistic: str) -> How:
    """How parts of a statistic fold; what is none of those that are known is each rank's own."""
    if statistic in _MOMENTS:
        return "moments"
    return "sum" if statistic in SUMS else _ENDS.get(statistic, "own")


def needed(statistic: str) -> tuple[str, ...]:
    """The columns that folding a statistic takes. The first one tells where there is a value at all."""
    if statistic in _MOMENTS:
        return _MOMENTS[statistic]
    return ("count", statistic) if way_of(statistic) in ("min", "max") else (statistic,)


@final
class RankFold:
    """The fold of one statistic over parts; arrays are (sites, steps), NaN where a part has nothing."""

    def __init__(self, statistic: str, how: How, shape: tuple[int, int]) -> None:
        self._statistic = statistic
        self._how = how
        self._parts = np.zeros(shape, np.int64)  # how many have a value
        self._total = np.full(shape, np.nan)  # of sums and extremes
        self._count = np.zeros(shape)  # of finite values, or of all
        self._mean = np.zeros(shape)
        self._deviation = np.zeros(shape)
        self._weight = np.zeros(shape)

    def add(self, columns: Columns, weight: Numbers | None = None) -> None:
        """Fold one more part in. ``weight`` is how many values a mean is of."""
        statistic = self._statistic
        names = needed(statistic) if self._how != "mean" else (statistic,)
        here = ~np.isnan(columns[names[0]])
        self._parts += here
        with np.errstate(all="ignore"):
            match self._how:
                case "sum":
                    more = self._total + _zero(columns[statistic])
                    self._total = np.where(np.isnan(self._total), columns[statistic], more)
                case "min":
                    self._total = np.fmin(self._total, columns[statistic])
                case "max":
                    self._total = np.fmax(self._total, columns[statistic])
                case "mean":
                    own = np.where(here, 1.0 if weight is None else weight, 0.0)
                    self._total = np.where(np.isnan(self._total), 0.0, self._total) + own * _zero(
                        columns[statistic]
                    )
                    self._weight += own
                case "moments":
                    self._add_moments(columns, here)

    def _add_moments(self, columns: Columns, here: npt.NDArray[np.bool_]) -> None:
        statistic = self._statistic
        if statistic == "ratio":
            weight = _zero(columns["weight_l2"])
            self._total = np.hypot(_zero(self._total), _zero(columns["ratio"]) * weight)
            self._count = np.hypot(self._count, weight)
            return
        count = np.where(here, columns["count"], 0.0)
        if statistic == "zeros":
            self._total = _zero(self._total) + count * _zero(columns["zeros"])
            self._count += count
            return
        if statistic == "l2":
            self._total = np.hypot(_zero(self._total), _zero(columns["l2"]))
            return
        finite = count - _zero(columns["nans"]) - _zero(columns["infs"])
        if statistic == "rms":
            self._total = np.hypot(_zero(self._total), _zero(columns["l2"]))
            self._count += finite
            return
        self._merge(finite, _zero(columns["mean"]), _zero(columns["std"]) if statistic == "std" else None)

    def _merge(self, count: Numbers, mean: Numbers, std: Numbers | None) -> None:
        """Two means, and two deviations from them, as one; halves keep means at opposite ends of the range finite."""
        total = self._count + count
        some = np.maximum(total, 1.0)
        share, keep = count / some, self._count / some
        both = (count > 0) & (self._count > 0)
        half = np.where(both, mean * 0.5 - self._mean * 0.5, 0.0)
        if std is not None:
            deviation = np.where(
                count > 1, std * np.sqrt(np.maximum(count - 1, 0) / np.maximum(count, 1)), 0.0
            )
            deviation = np.hypot(np.sqrt(keep) * self._deviation, np.sqrt(share) * deviation)
            self._deviation = np.hypot(deviation, half * (2 * np.sqrt(keep * share)))
        moved = self._mean + np.where(np.isfinite(half * 2), half * 2 * share, 0.0)
        far = self._mean * keep + mean * share
        merged = np.where(np.isfinite(half * 2), moved, far)
        self._mean = np.where(both, merged, np.where(self._count > 0, self._mean, mean))
        self._count = total

    def result(self, parts: int | npt.NDArray[np.int64]) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """The folded numbers, and where at least so many parts had a value."""
        statistic, count = self._statistic, self._count
        with np.errstate(all="ignore"):
            if self._how == "mean":
                values = self._total / self._weight
            elif self._how != "moments" or statistic == "l2":
                values = self._total
            elif statistic in ("zeros", "ratio"):
                values = self._total / count
            elif statistic == "rms":
                values = np.where(count > 0, self._total / np.sqrt(count), np.nan)
            elif statistic == "mean":
                values = np.where(count > 0, self._mean, np.nan)
            else:
                values = np.where(count > 1, self._deviation * np.sqrt(count / (count - 1)), np.nan)
        return values, (self._parts >= parts) & (self._parts > 0)


def _zero(numbers: Numbers) -> Numbers:
    """Nothing counts as zero."""
    return np.where(np.isnan(numbers), 0.0, numbers)
