"""Fold the values of several ranks into those of the whole. Numpy only.

- `share_out` groups ranks by their placements: ranks that differ only along replicated axes hold the same value, and
  one of them counts; ranks that differ along a divided axis hold different parts.
- `RankFold` folds the parts' statistics, for many sites and steps at once. The twelve statistics fold exactly, up to
  float64 rounding: counts, sums and extremes directly, moments through their counts. Parts are added one by one, so
  memory does not grow with the number of ranks.
- `quantile` computes quantiles of all ranks' values from the sketches that they kept. A sketch is a matrix with two
  rows of whole numbers. Its first column has the smallest value and the largest one, negated, as bits of float64; its
  second the number of bins per power of two; each further one a bin and its count.

Statistics of parts of a sum, and along an axis whose share is unknown, do not fold: `Sharing.why_own` marks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError
from torchtap.placement import Axis, Placement, Share

__all__ = ["SUMS", "How", "RankFold", "Sharing", "needed", "quantile", "share_of", "share_out", "way_of"]

How = Literal["moments", "sum", "min", "max", "mean", "quantile", "own"]
Numbers = npt.NDArray[np.float64]
Columns = Mapping[str, Numbers]


# --- which ranks hold which part ------------------------------------------------------------------------------


@final
class Sharing(NamedTuple):
    """The distinct parts of a whole: for each the ranks that hold it, in order."""

    parts: tuple[tuple[int, ...], ...]
    expected: int = 1  # how many parts there should be
    missing: tuple[str, ...] = ()  # where they would be: "dp 1"
    why_own: Literal["unknown", "partial"] | None = None  # why only one place of some axis is shown
    is_batch: bool = True  # parts are samples, not pieces of a tensor
    summands: tuple[Sharing, ...] = ()  # of a sum over ranks: how the ranks of each summand share theirs
    averaged: bool = False  # the whole is the mean of its summands, not the sum

    def is_whole(self, statistic: str, how: How) -> bool:
        """Return True if folding gives the statistic of the whole, False if it is that of some ranks.

        The mean of a sum is the sum of the means, and the summands have the shape of the sum. No other statistic of
        a sum follows from those of its summands.
        """
        if self.why_own is not None:
            return self.why_own == "partial" and statistic in ("mean", "count")
        return len(self.parts) == 1 or how != "own"


def share_out(placements: Mapping[int, Placement | None], *, summed: bool = False) -> Sharing:
    """Return how the values of some ranks belong together; ``summed`` counts the parts of a sum among the parts."""
    ranks = sorted(placements)
    known = _of_one_mesh({rank: placements[rank] for rank in ranks})
    if known is None:
        return Sharing((tuple(ranks[:1]),), why_own="unknown" if len(ranks) > 1 else None)
    everyone = known
    known, why = _at_one_place(known, summed)
    axes = next(iter(known.values())).axes
    dividing = [number for number, axis in enumerate(axes) if _divides(axis, summed)]
    divided = [axes[number] for number in dividing]
    groups = _by_place(known, dividing)
    return Sharing(
        tuple(tuple(groups[key]) for key in sorted(groups)),
        prod(axis.size for axis in divided),
        _missing(divided, groups),
        why,
        is_batch=all(axis.share.kind == "batch" for axis in divided),
        **(_summands(everyone, axes) if why == "partial" else {}),
    )


def _summands(everyone: Mapping[int, Placement], axes: Sequence[Axis]) -> dict[str, Any]:
    """Return how each summand of a sum over ranks is shared; nothing if a summand is missing or ranks do not add."""
    adding = [number for number, axis in enumerate(axes) if axis.share.kind == "partial"]
    ops = {axes[number].share.op or "sum" for number in adding}
    groups = _by_place(everyone, adding)
    if (
        not ops <= {"sum", "avg"}
        or len(ops) > 1
        or len(groups) < prod(axes[number].size for number in adding)
    ):
        return {}
    plain = dict.fromkeys([axes[number].name for number in adding], Share("replicate"))
    shared = (
        share_out({rank: everyone[rank].with_shares(plain) for rank in each}) for each in groups.values()
    )
    return {"summands": tuple(shared), "averaged": ops == {"avg"}}


def _of_one_mesh(placements: Mapping[int, Placement | None]) -> dict[int, Placement] | None:
    """Return the ranks of the lowest mesh; None if a rank's placement is not known or the ranks' meshes differ."""
    known = {rank: placed for rank, placed in placements.items() if placed is not None}
    if not known or len(known) < len(placements):
        return None
    root = min(placed.root for placed in known.values())
    of_root = {rank: placed for rank, placed in known.items() if placed.root == root}
    return of_root if len({_signature(placed) for placed in of_root.values()}) == 1 else None


def _at_one_place(
    known: dict[int, Placement], summed: bool
) -> tuple[dict[int, Placement], Literal["unknown", "partial"] | None]:
    """Return the ranks at the lowest place of each axis along which values are not put together, and why."""
    why: Literal["unknown", "partial"] | None = None
    for number, axis in enumerate(next(iter(known.values())).axes):
        kind = axis.share.kind
        places = {placed.axes[number].at for placed in known.values()}
        if len(places) > 1 and (kind == "unknown" or (kind == "partial" and not summed)):
            why = "unknown" if "unknown" in (why, kind) else "partial"
            known = {rank: placed for rank, placed in known.items() if placed.axes[number].at == min(places)}
    return known, why


def _by_place(known: Mapping[int, Placement], axes: list[int]) -> dict[tuple[int, ...], list[int]]:
    """Group ranks by their place along some axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, placed in known.items():
        groups.setdefault(tuple(placed.axes[number].at for number in axes), []).append(rank)
    return groups


def _divides(axis: Axis, summed: bool) -> bool:
    return axis.share.divides or (summed and axis.share.kind == "partial")


def _signature(placed: Placement) -> tuple[tuple[str, int, str], ...]:
    return tuple((axis.name, axis.size, str(axis.share)) for axis in placed.axes)


def _missing(axes: list[Axis], groups: Mapping[tuple[int, ...], list[int]]) -> tuple[str, ...]:
    """Return the places of divided axes at which no rank has the value, along each axis by itself."""
    found = []
    for number, axis in enumerate(axes):
        here = {key[number] for key in groups}
        found += [f"{axis.name} {at}" for at in range(min(axis.size, 4096)) if at not in here]
    return tuple(found)


# --- statistics -----------------------------------------------------------------------------------------------


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
    """Return how parts of a statistic fold. A statistic that is not known is each rank's own."""
    if statistic in _MOMENTS:
        return "moments"
    return "sum" if statistic in SUMS else _ENDS.get(statistic, "own")


def needed(statistic: str) -> tuple[str, ...]:
    """Return the columns that folding a statistic needs. The first one shows where there is a value at all."""
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
        """Fold one more part. ``weight`` is the number of values of a mean."""
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
        """Merge two means and their deviations. Halves keep means at opposite ends of the range finite."""
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
        """Return the folded numbers, and where at least ``parts`` parts had a value."""
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
    """Replace NaN by zero."""
    return np.where(np.isnan(numbers), 0.0, numbers)


# --- quantiles ------------------------------------------------------------------------------------------------


_LOW, _HIGH = -64, 64  # exponents of two between which the bins lie


def share_of(statistic: str) -> float | None:
    """Return the share that a statistic such as ``p99.9`` names; None for any other."""
    try:
        share = float(statistic[1:]) / 100 if statistic[:1] == "p" else -1.0
    except ValueError:
        return None
    return share if 0 <= share <= 1 else None


def quantile(sketches: Sequence[np.ndarray], share: float) -> float:
    """Return the value below which this share of all values lies."""
    fine = {int(sketch[0, 1]) for sketch in sketches if sketch.ndim == 2 and sketch.shape[1] >= 2}
    if len(fine) != 1 or not 1 <= (per_octave := fine.pop()) <= 1 << 20:
        raise RunCorruptError("sketches of quantiles are not alike, or are none")
    middles = _middles(per_octave)
    counts = np.zeros(len(middles), np.int64)
    low = high = np.inf
    for sketch in sketches:
        ends = np.ascontiguousarray(sketch[:, 0]).view(np.float64)
        low, high = min(low, float(ends[0])), min(high, float(ends[1]))
        places, held = sketch[:, 2:]
        real = places < len(middles)  # the last two places count what is no number
        np.add.at(counts, places[real], held[real])
    upto = np.cumsum(counts)
    total = int(upto[-1])
    if not total:
        return float("nan")
    rank = int(np.floor(share * (total - 1)))
    if rank == 0:
        return low
    if rank == total - 1:
        return -high
    place = int(np.searchsorted(upto, rank, side="right"))
    return float(min(max(middles[place], low), -high))


@lru_cache(maxsize=4)
def _middles(per_octave: int) -> npt.NDArray[np.float64]:
    steps = np.arange((_HIGH - _LOW) * per_octave, dtype=np.float64)
    octave = np.floor(steps / per_octave)
    inside = 1 + (steps - octave * per_octave) / per_octave
    positive = np.append(inside * np.exp2(octave + _LOW), 2.0**_HIGH)
    edges = np.concatenate([-positive[::-1], positive])
    return np.concatenate([[-np.inf], (edges[:-1] + edges[1:]) / 2, [np.inf]])
