"""The depth × time map: one statistic, sites in execution order against steps, as small as the screen.

Every cell carries the least and the greatest value of what lies under it, so that a single spike among ten
thousand steps is still in the picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from torchtap.names import is_inside, kind_of, path_of
from torchtap.viewer.catalog import BLOCK, NumberGrid, OpenRun, Refused
from torchtap.viewer.downsample import extremes
from torchtap.viewer.wire import pack

__all__ = ["MapWindow", "heat_map"]

_SAMPLE = 200_000
_QUANTILES = (0.0, 0.01, 0.05, 0.5, 0.95, 0.99, 1.0)


@final
@dataclass(frozen=True, slots=True)
class MapWindow:
    """Which part of the map is asked for, and how large it may be."""

    statistic: str
    kind: str = ""  # empty: every kind
    under: str = ""  # only sites of this module and the modules inside it
    first_step: int | None = None
    last_step: int | None = None
    first_row: int = 0
    last_row: int | None = None  # not included
    rows: int = 700
    columns: int = 1200


def _inside(site: str, module: str) -> bool:
    path = path_of(site)
    return path == module or is_inside(path, module)


def _quantiles(finite: npt.NDArray[np.float32], least: float, greatest: float) -> list[float] | None:
    if not len(finite):
        return None
    quantiles = np.quantile(finite.astype(np.float64), _QUANTILES)
    quantiles[0], quantiles[-1] = min(quantiles[0], least), max(quantiles[-1], greatest)
    return [float(q) for q in quantiles]


def _range(grid: NumberGrid, rows: list[int]) -> dict[str, Any]:
    """What the page needs to choose colours: quantiles of the finite values, and of those above zero.

    Of the whole map, not of the part that is looked at, so that colours keep their meaning in a zoom. The
    quantiles come from a sample, the two ends from every value.
    """
    low, high = (plane[_as_slice(rows)] for plane in grid.blocks())
    stride = max(1, low.size // _SAMPLE)
    sample = np.concatenate([np.ravel(plane)[::stride] for plane in (low, high)])
    sample = sample[np.isfinite(sample)]
    least, greatest = (float(f(plane)) for f, plane in ((_least, low), (_greatest, high)))
    above = least if least > 0 else float("inf")
    return {
        "quantiles": _quantiles(sample, least, greatest),
        "positive": _quantiles(sample[sample > 0], above, greatest),
    }


def _least(plane: npt.NDArray[np.float32]) -> float:
    found = float(np.fmin.reduce(plane, axis=None)) if plane.size else float("nan")
    if np.isfinite(found):
        return found
    finite = plane[np.isfinite(plane)]
    return float(finite.min()) if len(finite) else float("inf")


def _greatest(plane: npt.NDArray[np.float32]) -> float:
    return -_least(-plane)


def _cells(
    shown: OpenRun, grid: NumberGrid, rows: list[int], chosen: list[int], span: slice, window: MapWindow
) -> tuple[
    npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64], int
]:
    """Least and greatest value of each cell, where rows start, the step each column starts at, all steps."""
    steps = grid.steps[span]
    picked = _as_slice(chosen)
    if len(rows) == len(grid.sites) and len(steps) >= 2 * BLOCK * window.columns:
        # A wide view is made of blocks that were computed once; it starts and ends with whole blocks.
        blocks = slice(span.start // BLOCK, -(-span.stop // BLOCK))
        low, high = (plane[picked, blocks] for plane in grid.blocks())
        low, high, row_starts, columns = extremes(low, window.rows, window.columns, highs=high)
        return low, high, row_starts, grid.steps[(columns + blocks.start) * BLOCK], len(steps)
    part = grid.values[picked, span]
    if len(steps) and len(rows) < len(grid.sites):
        there = _recorded_columns(shown, grid, chosen, part, span)
        if not there.all():
            part, steps = part[:, there], steps[there]
    low, high, row_starts, columns = extremes(part, window.rows, window.columns)
    return low, high, row_starts, steps[columns], len(steps)


def _rows_of(grid: NumberGrid, window: MapWindow) -> list[int]:
    return [
        row
        for row, site in enumerate(grid.sites)
        if (not window.kind or kind_of(site) == window.kind)
        and (not window.under or _inside(site, window.under))
    ]


def heat_map(shown: OpenRun, window: MapWindow) -> bytes:
    """The part of the map under ``window``.

    Arrays: low and, if it differs, high (rows × columns), the steps and rows where cells start, and which
    sites the rows are (numbers in the run's list of sites).
    """
    with shown.lock:
        grid = shown.grid(window.statistic)
        rows = _rows_of(grid, window)
        chosen = rows[window.first_row : window.last_row]
        first = 0 if window.first_step is None else int(np.searchsorted(grid.steps, window.first_step))
        last = len(grid.steps)
        if window.last_step is not None:
            last = int(np.searchsorted(grid.steps, window.last_step, side="right"))
        low, high, row_starts, steps, count = _cells(shown, grid, rows, chosen, slice(first, last), window)
        facts = {
            "statistic": window.statistic,
            "rows": len(rows),
            "firstRow": window.first_row,
            "shownRows": len(chosen),
            "shownSteps": count,
            "lastStep": int(grid.steps[last - 1]) if last > first else None,
            "revision": shown.revision,
            "siteCount": len(shown.sites),
            "range": shown.remember(
                ("range", window.statistic, window.kind, window.under), lambda: _range(grid, rows)
            ),
        }
        members = np.array([shown.position[grid.sites[row]] for row in chosen], dtype=np.int32)
    # Where nothing had to be left out both are the same, and one is enough.
    several = {} if np.array_equal(low, high, equal_nan=True) else {"high": high}
    return pack(
        facts,
        {
            "low": low,
            **several,
            "steps": steps.astype(np.float64),
            "rowStarts": row_starts.astype(np.int32),
            "members": members,
        },
    )


def _as_slice(rows: list[int]) -> slice | list[int]:
    """``rows`` as a slice where they lie together, so that numpy makes no copy."""
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return rows


def _recorded_columns(
    shown: OpenRun, grid: NumberGrid, rows: list[int], part: npt.NDArray[np.float32], window: slice
) -> npt.NDArray[np.bool_]:
    """Which steps hold anything of these sites: a kind that has a schedule of its own skips the others.

    A statistic of nothing but NaN is NaN as well; the number of NaNs tells it from a step without a record.
    """
    there = _any_value(part)
    if not there.all() and grid is not (counted := _counted(shown)) and counted is not None:
        same = [counted.row[site] for row in rows if (site := grid.sites[row]) in counted.row]
        there |= _any_value(counted.values[_as_slice(same), window])
    return there


def _counted(shown: OpenRun) -> NumberGrid | None:
    try:
        return shown.grid("nans")
    except Refused:
        return None


def _any_value(part: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Which columns have a value in any row."""
    there = np.zeros(part.shape[1], dtype=bool)
    for start in range(0, part.shape[0], 64):
        there |= ~np.isnan(part[start : start + 64]).all(axis=0)
        if there.all():
            break
    return there
