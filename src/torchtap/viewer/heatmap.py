"""The depth × time map: one statistic, sites in execution order against steps, as small as the screen.

Every cell carries the least and the greatest value of what lies under it, so that a single spike among ten
thousand steps is still in the picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.plan.names import is_inside, kind_of, path_of, path_parts
from torchtap.viewer.downsample import extremes
from torchtap.viewer.opened import BLOCK, NumberGrid, OpenRun, Refused
from torchtap.viewer.wire import pack

__all__ = ["MapWindow", "bands_of", "heat_map"]

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
    fold: int | None = None  # one row for each module of this depth

    def span(self, steps: npt.NDArray[np.int64]) -> slice:
        """The steps that are asked for, among those that there are."""
        first = 0 if self.first_step is None else int(np.searchsorted(steps, self.first_step))
        if self.last_step is None:
            return slice(first, len(steps))
        return slice(first, max(first, int(np.searchsorted(steps, self.last_step, side="right"))))


def _inside(site: str, module: str) -> bool:
    path = path_of(site)
    return path == module or is_inside(path, module)


def _quantiles(finite: npt.NDArray[np.float32], least: float, greatest: float) -> list[float] | None:
    if not len(finite):
        return None
    quantiles = np.quantile(finite.astype(np.float64), _QUANTILES)
    quantiles[0], quantiles[-1] = min(quantiles[0], least), max(quantiles[-1], greatest)
    return [float(q) for q in quantiles]


def _range(grid: NumberGrid, rows: list[int]) -> dict[str, object]:
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


Bands = list[list[int]]  # for each row of the whole map, the rows of the grid that it stands for


def bands_of(grid: NumberGrid, window: MapWindow) -> tuple[Bands, list[str] | None]:
    """The rows of the whole map, and what they are called where a row is more than a site."""
    rows = [
        row
        for row, site in enumerate(grid.sites)
        if (not window.kind or kind_of(site) == window.kind)
        and (not window.under or _inside(site, window.under))
    ]
    if window.fold is None:
        return [[row] for row in rows], None
    folded: dict[str, list[int]] = {}
    for row in rows:
        parts = path_parts(path_of(grid.sites[row]))
        folded.setdefault(".".join(parts[: window.fold]), []).append(row)
    return list(folded.values()), list(folded)


def _planes(
    grid: NumberGrid, chosen: Bands, span: slice, columns: int, whole: bool
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Least and greatest value of each chosen band at each step, and the steps."""
    flat = [row for band in chosen for row in band]
    picked = _as_slice(flat)
    if whole and span.stop - span.start >= 2 * BLOCK * columns:
        # A wide view is made of blocks that were computed once; it starts and ends with whole blocks.
        blocks = slice(span.start // BLOCK, -(-span.stop // BLOCK))
        low, high = (plane[picked, blocks] for plane in grid.blocks())
        steps = grid.steps[blocks.start * BLOCK : span.stop : BLOCK]
    else:
        low = high = grid.values[picked, span]
        steps = grid.steps[span]
    if len(flat) > len(chosen) and low.size:
        starts = np.cumsum([0, *(len(band) for band in chosen[:-1])])
        low, high = np.fmin.reduceat(low, starts, axis=0), np.fmax.reduceat(high, starts, axis=0)
    return low, high, steps


def _cells(
    shown: OpenRun, grid: NumberGrid, bands: Bands, chosen: Bands, span: slice, window: MapWindow
) -> tuple[
    npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64], int
]:
    """Least and greatest value of each cell, where rows start, the step each column starts at, all steps."""
    whole = sum(map(len, bands)) == len(grid.sites)
    low, high, steps = _planes(grid, chosen, span, window.columns, whole)
    count = span.stop - span.start
    if len(steps) and not whole:
        there = _recorded_columns(shown, grid, [row for band in chosen for row in band], low, span)
        if not there.all():
            low, high, steps = low[:, there], high[:, there], steps[there]
            count = len(steps)
    low, high, row_starts, columns = extremes(low, window.rows, window.columns, highs=high)
    return low, high, row_starts, steps[columns], count


def heat_map(shown: OpenRun, window: MapWindow, grid: NumberGrid | None = None) -> bytes:
    """The part of the map under ``window``; of ``grid`` where it is no statistic of the run itself.

    Arrays: low and, if it differs, high (rows × columns), the steps where columns start, the rows of the whole map
    where rows start, and where in the list of sites each of those begins.
    """
    own = grid is None
    with shown.lock:
        grid = shown.grid(window.statistic) if grid is None else grid
        bands, names = bands_of(grid, window)
        chosen = bands[window.first_row : window.last_row]
        span = window.span(grid.steps)
        low, high, row_starts, steps, count = _cells(shown, grid, bands, chosen, span, window)
        rows = [row for band in bands for row in band]
        key = ("range", window.statistic, window.kind, window.under)
        facts = {
            "run": shown.name,
            "statistic": window.statistic,
            "rows": len(bands),
            "firstRow": window.first_row,
            "shownRows": len(chosen),
            "shownSteps": count,
            "allSteps": len(grid.steps),
            "lastStep": next(reversed(grid.steps[span].tolist()), None),
            "revision": shown.revision,
            "sites": [grid.sites[row] for band in chosen for row in band],
            "names": None if names is None else names[window.first_row : window.last_row],
            "range": shown.remember(key, lambda: _range(grid, rows)) if own else _range(grid, rows),
        }
    sizes = np.array([len(band) for band in chosen], dtype=np.int32)
    # Where nothing had to be left out both are the same, and one is enough.
    several = {} if np.array_equal(low, high, equal_nan=True) else {"high": high}
    return pack(
        facts,
        {
            "low": low,
            **several,
            "steps": steps.astype(np.float64),
            "rowStarts": row_starts.astype(np.int32),
            "bandStarts": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
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
    counted = None if there.all() else _counted(shown)
    if counted is not None and grid is not counted and np.array_equal(grid.steps, counted.steps):
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
