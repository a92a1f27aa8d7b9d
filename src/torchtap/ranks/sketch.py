"""Quantiles of several ranks' values from the sketches that they kept: as if one process had seen all of them.

A sketch is a matrix of two rows of whole numbers. Its first column has the smallest value and the largest one, negated,
as the bits of float64; its second how many bins there are to a power of two; each further one a bin and its count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError

__all__ = ["quantile", "share_of"]

_LOW, _HIGH = -64, 64  # exponents of two between which the bins lie


def share_of(statistic: str) -> float | None:
    """The share that a statistic such as ``p99.9`` names; None for any other."""
    try:
        share = float(statistic[1:]) / 100 if statistic[:1] == "p" else -1.0
    except ValueError:
        return None
    return share if 0 <= share <= 1 else None


def quantile(sketches: Sequence[np.ndarray], share: float) -> float:
    """The value below which so large a share of all values lies."""
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
