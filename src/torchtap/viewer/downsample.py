"""Fewer numbers, the same picture: what a screen can show of a long series or a large grid.

Guarantees, each held by a test:
- the smallest and the largest value of every stretch survive, so no spike is ever hidden;
- a series keeps real points (a step and its own values), never averages;
- what already fits is returned unchanged.

Not here: reading runs (`series`, `heatmap`) and colours (the page).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["block_extremes", "buckets", "extremes", "keep_points"]


def buckets(length: int, most: int) -> npt.NDArray[np.int64]:
    """Where each of at most ``most`` nearly equal stretches of ``length`` items starts."""
    if length <= 0:
        return np.zeros(0, dtype=np.int64)
    count = max(1, min(length, most))
    return np.arange(count, dtype=np.int64) * length // count


def extremes(
    values: npt.NDArray[np.floating],
    rows: int,
    columns: int,
    *,
    highs: npt.NDArray[np.floating] | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The least and the greatest value of each cell of a grid of at most ``rows`` × ``columns``.

    Also returns where each row and column of the new grid starts in the old one. NaN means "nothing here":
    a cell is NaN only if all its values are. ``highs`` are the greatest values where ``values`` are already
    the least of something.
    """
    row_starts = buckets(values.shape[0], rows)
    column_starts = buckets(values.shape[1], columns)
    if not len(row_starts) or not len(column_starts):
        nothing = np.zeros((len(row_starts), len(column_starts)), dtype=np.float32)
        return nothing, nothing, row_starts, column_starts
    # fmin and fmax leave NaN out, which is what "nothing here" asks for.
    low, high = values, values if highs is None else highs
    if len(column_starts) < values.shape[1]:
        low = np.fmin.reduceat(low, column_starts, axis=1)
        high = np.fmax.reduceat(high, column_starts, axis=1)
    if len(row_starts) < values.shape[0]:
        low = np.fmin.reduceat(low, row_starts, axis=0)
        high = np.fmax.reduceat(high, row_starts, axis=0)
    with np.errstate(over="ignore"):
        return low.astype(np.float32), high.astype(np.float32), row_starts, column_starts


def block_extremes(
    values: npt.NDArray[np.float32], size: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The least and the greatest of every ``size`` columns; the last block may be shorter."""
    whole = values.shape[1] // size * size
    low, high = values[:, 0:whole:size], values[:, 0:whole:size]
    for offset in range(1, size):
        column = values[:, offset:whole:size]
        low, high = np.fmin(low, column), np.fmax(high, column)
    if whole < values.shape[1]:
        rest = values[:, whole:]
        low = np.concatenate([low, np.fmin.reduce(rest, axis=1, keepdims=True)], axis=1)
        high = np.concatenate([high, np.fmax.reduce(rest, axis=1, keepdims=True)], axis=1)
    return np.ascontiguousarray(low), np.ascontiguousarray(high)


def keep_points(columns: Sequence[npt.NDArray[np.floating]], points: int) -> npt.NDArray[np.int64]:
    """Which indices of several series of one length to keep so that each keeps every stretch's extremes.

    The first and the last are always kept, and in each stretch the first value that is not finite, so that
    a gap or an infinity shows where it begins.
    """
    length = len(columns[0]) if columns else 0
    if length <= points:
        return np.arange(length, dtype=np.int64)
    starts = buckets(length, max(1, points // 2))
    ends = np.append(starts[1:], length)
    kept: set[int] = {0, length - 1}
    for values in columns:
        finite = np.isfinite(values)
        low = np.where(finite, values, np.inf)
        high = np.where(finite, values, -np.inf)
        odd = np.flatnonzero(~finite)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            kept.add(start + int(low[start:end].argmin()))
            kept.add(start + int(high[start:end].argmax()))
        if len(odd):
            positions = np.searchsorted(odd, starts)
            nearest = odd[np.minimum(positions, len(odd) - 1)]
            kept.update(nearest[(positions < len(odd)) & (nearest < ends)].tolist())
    return np.array(sorted(kept), dtype=np.int64)
