"""Compute the charts of one or two runs: series, scalars, histograms, maps, attention, tensors, changes, ranks.

Each function takes an open run and a window and returns the packed answer for the page. Every extreme and every value
that is not finite survives downsampling. The size of an answer is bounded, whatever a run contains.

Not here: parsing of parameters (`server`), locks and caches (`open_run`), encoding (`arrays`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from torchtap import Run
from torchtap.sanitize import browser_text
from torchtap.spi import ModulePath, Name
from torchtap.store.read.results import TensorRef
from torchtap.viewer.arrays import DERIVED, buckets, encode_json, extremes, keep_points, pack
from torchtap.viewer.open_run import BLOCK, NumberGrid, OpenRun, Refused

__all__ = [
    "MapWindow", "SliceWindow", "bands_of", "changes_between", "column_of", "entropy_of", "gaps_of",
    "grid_difference", "heat_map", "histograms_of", "mean_grid", "ranks_at", "ranks_of", "scalars_of",
    "series_of", "slice_of", "smoothed", "span_of", "tensors_of",
]  # fmt: skip


def series_of(
    shown: OpenRun,
    site: str,
    statistics: list[str],
    first_step: int | None = None,
    last_step: int | None = None,
    points: int = 1600,
) -> bytes:
    """``statistics`` of ``site`` over the steps that have any of them, at most about ``points`` steps."""
    with shown.lock:
        if site not in shown.position:
            raise Refused(f"this run has no site {site!r}", 404)
        steps, columns, there = _on_common_steps(shown, site, statistics)
        total = len(steps)
        inside = np.ones(total, dtype=bool)
        if first_step is not None:
            inside &= steps >= first_step
        if last_step is not None:
            inside &= steps <= last_step
        steps = steps[inside]
        columns = {key: column[inside] for key, column in columns.items()}
        kept = keep_points(list(columns.values()), max(2, points // max(1, len(columns))))
        facts = {"site": site, "statistics": list(columns), "total": total, "gaps": gaps_of(steps)}
        facts["revision"] = shown.revision
    arrays: dict[str, np.ndarray] = {"steps": steps[kept].astype(np.float64)}
    for number, (name, column) in enumerate(columns.items()):
        arrays[f"s{number}"] = column[kept]
        recorded = there[name][inside][kept]
        if not recorded.all():
            arrays[f"t{number}"] = recorded.astype(np.uint8)
    return pack(facts, arrays)


def _on_common_steps(
    shown: OpenRun, site: str, statistics: list[str]
) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[np.float64]], dict[str, npt.NDArray[np.bool_]]]:
    """Return the site's statistics on the union of their steps, and which of the values were recorded."""
    found: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = {}
    for name in dict.fromkeys(statistics):
        if name in shown.statistics[site]:
            found[name] = shown.series(site, name)
        elif name in DERIVED and site in shown.grid(name).row:
            grid = shown.grid(name)
            row = grid.values[grid.row[site]].astype(np.float64)
            found[name] = grid.steps[~np.isnan(row)], row[~np.isnan(row)]
    every = [its for its, _ in found.values()]
    steps = np.unique(np.concatenate(every)) if every else np.zeros(0, dtype=np.int64)
    columns, there = {}, {}
    for name, (its_steps, values) in found.items():
        at = np.searchsorted(steps, its_steps)
        columns[name] = np.full(len(steps), np.nan)
        there[name] = np.zeros(len(steps), dtype=bool)
        columns[name][at], there[name][at] = values, True
    return steps, columns, there


def gaps_of(steps: npt.NDArray[np.int64], most: int = 200) -> list[list[int]]:
    """Return the pairs of neighbouring steps between which records are missing.

    A gap is more than three times as long as the distances on both of its sides, so that a schedule that becomes
    sparser is none.
    """
    if len(steps) < 4:
        return []
    away = np.diff(steps)
    before, after = np.r_[away[1], away[:-1]], np.r_[away[1:], away[-2]]
    at = np.flatnonzero(away > 3 * np.maximum(before, after))[:most]
    return [[int(steps[i]), int(steps[i + 1])] for i in at]


def scalars_of(
    shown: OpenRun, site: str, *, phase: str | None = None, smooth: float = 0.0, points: int = 2000
) -> bytes:
    """One logged value: arrays steps, epochs, seconds (since the run's first record), value, and smooth."""
    with shown.lock:
        if site not in shown.position or "value" not in shown.statistics[site]:
            raise Refused(f"this run has no logged value {site!r}", 404)
        steps, values = shown.series(site, "value", phase)
        epochs, seconds = shown.clock_of(steps)
        revision = shown.revision
    columns = [values]
    if smooth > 0:
        columns.append(smoothed(values, smooth))
    kept = keep_points(columns, points)
    arrays: dict[str, np.ndarray] = {
        "steps": steps[kept].astype(np.float64),
        "epochs": epochs[kept],
        "seconds": seconds[kept],
        "value": values[kept],
    }
    if smooth > 0:
        arrays["smooth"] = columns[1][kept]
    facts = {"site": site, "total": len(steps), "gaps": gaps_of(steps), "revision": revision}
    return pack(facts, arrays)


def smoothed(values: npt.NDArray[np.float64], weight: float) -> npt.NDArray[np.float64]:
    """An exponential average without the pull of its start; what is not finite is left out and stays a gap."""
    weight = min(max(weight, 0.0), 0.999)
    result = np.full(len(values), np.nan)
    total = share = 0.0
    for index, value in enumerate(values.tolist()):
        if np.isfinite(value):
            total = weight * total + (1 - weight) * value
            share = weight * share + (1 - weight)
            result[index] = total / share
    return result


_BINS = 96
_TAIL = 0.001
_LARGEST = 1 << 20  # bytes of one histogram

Floats = npt.NDArray[np.float64]
Counted = tuple[int, Floats, Floats]  # step, counts, edges


def histograms_of(shown: OpenRun, site: str, *, linear: bool = True, columns: int = 240) -> bytes:
    """Array ``density``: steps × bins, values to a unit of the axis, of all values that the bins hold.

    ``linear``: equal bins. Otherwise the bins as recorded, without the empty ones at both ends, and ``density``
    holds counts. Of more than ``columns`` steps every n-th is sent, and always the last.
    """
    steps, found, revision = _read(shown, site, columns)
    if not found:
        return pack({"site": site, "total": 0}, {})
    equal = all(np.array_equal(found[0][2], edges) for _, _, edges in found)
    if linear or not equal:
        rows, edges, beyond = _in_equal_bins(found, linear)
    else:
        rows, edges = _as_recorded(found)
        beyond = np.zeros(len(found))
    return pack(
        {"site": site, "total": len(steps), "linear": linear, "revision": revision},
        {
            "density": rows.astype(np.float32),
            "edges": edges.astype(np.float64),
            "steps": np.array([step for step, _, _ in found], dtype=np.float64),
            "beyond": beyond,
        },
    )


def _in_equal_bins(found: list[Counted], density: bool) -> tuple[Floats, Floats, Floats]:
    """All steps in the same equal bins, the bins' edges, and how many values of each step lie outside."""
    low, high = _span(found, _TAIL if density else 0.0)
    edges = np.linspace(low, high if high > low else low + (abs(low) or 1.0), _BINS + 1)
    rows = np.stack([_rebin(counts, own, edges) for _, counts, own in found])
    totals = np.array([counts.sum() for _, counts, _ in found])
    beyond = np.maximum(0.0, totals - rows.sum(axis=1))
    if density:
        rows = rows / np.maximum(totals, 1.0)[:, None] / np.diff(edges)
    return rows, edges, beyond


def _as_recorded(found: list[Counted]) -> tuple[Floats, Floats]:
    """Counts and edges, without the bins at both ends that are empty in all steps."""
    edges = found[0][2]
    held = np.flatnonzero(np.sum([counts for _, counts, _ in found], axis=0))
    part = slice(held[0], held[-1] + 1) if len(held) else slice(0, len(edges) - 1)
    return np.stack([counts[part] for _, counts, _ in found]), edges[part.start : part.stop + 1]


def _read(shown: OpenRun, site: str, columns: int) -> tuple[list[int], list[Counted], int]:
    with shown.lock:
        kept = [r for r in shown.run.tensors(site) if "histogram" in str(r.reduction).lower()]
        if any(r.unpacked > _LARGEST for r in kept):
            raise Refused("a histogram of this site has too many bins to draw", 413)
        steps = sorted({int(r.step) for r in kept})
        chosen = [steps[start] for start in buckets(len(steps), columns)]
        if steps and chosen[-1] != steps[-1]:
            chosen.append(steps[-1])
        found = [_counted(shown, site, step) for step in chosen]
        return steps, [each for each in found if each is not None], shown.revision


def _counted(shown: OpenRun, site: str, step: int) -> Counted | None:
    """A step's counts and edges; None where they cannot be those of a histogram."""
    result = shown.run.histogram(site, step)
    counts = np.asarray(result.counts, dtype=np.float64).ravel()
    edges = np.asarray(result.edges, dtype=np.float64).ravel()
    sound = len(counts) > 0 and len(edges) == len(counts) + 1 and bool(np.isfinite(edges).all())
    return (step, counts, edges) if sound else None


def _span(found: list[Counted], tail: float) -> tuple[float, float]:
    """The ends between which all but the share ``tail`` of each step's values lie."""
    lows, highs = [], []
    for _, counts, edges in found:
        total = counts.sum()
        if not total:
            continue
        below = np.concatenate([[0.0], np.cumsum(counts)]) / total
        first = int(np.searchsorted(below, tail, side="right")) - 1
        last = int(np.searchsorted(below, 1.0 - tail, side="left"))
        lows.append(edges[max(0, first)])
        highs.append(edges[min(len(edges) - 1, last)])
    if not lows:
        return float(found[0][2][0]), float(found[0][2][-1])
    return float(min(lows)), float(max(highs))


def _rebin(
    counts: npt.NDArray[np.float64], own: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """``counts`` on other edges, each bin's mass spread evenly over its width."""
    below = np.interp(edges, own, np.concatenate([[0.0], np.cumsum(counts)]))
    return np.diff(below)


_SAMPLE = 200_000
_QUANTILES = (0.0, 0.01, 0.05, 0.5, 0.95, 0.99, 1.0)


@final
@dataclass(frozen=True, slots=True)
class MapWindow:
    """The requested part of a map, and how large the answer may be."""

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
    leaves: bool = True  # False: one row for a cache or another large structure of leaves

    def span(self, steps: npt.NDArray[np.int64]) -> slice:
        """Return the recorded steps that lie in the window."""
        first = 0 if self.first_step is None else int(np.searchsorted(steps, self.first_step))
        if self.last_step is None:
            return slice(first, len(steps))
        return slice(first, max(first, int(np.searchsorted(steps, self.last_step, side="right"))))


def _inside(site: str, module: str) -> bool:
    path = Name.read(site).module
    return path == module or path.is_inside(module)


def _quantiles(finite: npt.NDArray[np.float32], least: float, greatest: float) -> list[float] | None:
    if not len(finite):
        return None
    quantiles = np.quantile(finite.astype(np.float64), _QUANTILES)
    quantiles[0], quantiles[-1] = min(quantiles[0], least), max(quantiles[-1], greatest)
    return [float(q) for q in quantiles]


def _range(grid: NumberGrid, rows: list[int]) -> dict[str, object]:
    """Return what the page needs to choose colours: quantiles of the finite values, and of those above zero.

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


_FEW_LEAVES = 6


def bands_of(grid: NumberGrid, window: MapWindow) -> tuple[Bands, list[str | None] | None]:
    """Return the rows of the whole map, and the name of each that is more than a site (None: the site's own)."""
    rows = [
        row
        for row, site in enumerate(grid.sites)
        if (not window.kind or Name.read(site).kind == window.kind)
        and (not window.under or _inside(site, window.under))
    ]
    if window.fold is None and window.leaves:
        return [[row] for row in rows], None
    folded: dict[str, list[int]] = {}
    for row in rows:
        parts = Name.read(grid.sites[row]).module.parts
        key = _structure(grid.sites[row]) if window.fold is None else ".".join(parts[: window.fold])
        folded.setdefault(key, []).append(row)
    if window.fold is not None:
        return list(folded.values()), list(folded)
    bands: Bands = []
    names: list[str | None] = []
    for key, band in folded.items():
        large = len(band) > _FEW_LEAVES
        bands += [band] if large else [[row] for row in band]
        names += [f"{key}.* ({len(band)})"] if large else [None] * len(band)
    return bands, names if any(names) else None


def _structure(site: str) -> str:
    """Return what a leaf is part of: the site's name up to the first component of its leaf."""
    name = Name.read(site)
    return str(name._replace(leaf="".join(ModulePath(name.leaf).parts[:1]), call=0))


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
    low, high, steps = _with_gaps(low, high, steps)
    low, high, row_starts, columns = extremes(low, window.rows, window.columns, highs=high)
    return low, high, row_starts, steps[columns], count


def _with_gaps(
    low: npt.NDArray[np.float32], high: npt.NDArray[np.float32], steps: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Insert columns without a value where records are missing; at most a tenth of the columns for each gap."""
    for first, last in reversed(gaps_of(steps, 20)):
        at = int(np.searchsorted(steps, last))
        usual = max(1, int(np.median(np.diff(steps))))
        missing = max(1, min((last - first) // usual - 1, 1 + len(steps) // 10))
        between = np.linspace(first, last, missing + 2)[1:-1].round().astype(steps.dtype)
        low, high = (np.insert(plane, [at] * missing, np.nan, axis=1) for plane in (low, high))
        steps = np.insert(steps, [at] * missing, between)
    return low, high, steps


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
    # Both are equal if nothing was left out; one is enough then.
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

    A statistic of nothing but NaN is NaN as well; the number of NaNs distinguishes it from a step without a record.
    """
    there = _any_value(part)
    counted = None if there.all() else _grid_or_none(shown, "nans")
    if counted is not None and grid is not counted and np.array_equal(grid.steps, counted.steps):
        same = [counted.row[site] for row in rows if (site := grid.sites[row]) in counted.row]
        there |= _any_value(counted.values[_as_slice(same), window])
    return there


def _grid_or_none(shown: OpenRun, statistic: str) -> NumberGrid | None:
    try:
        return shown.grid(statistic)
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


_STEPS = 48
_VALUES = 1 << 22  # of one tensor


def entropy_of(shown: OpenRun, site: str) -> bytes:
    """Array ``entropy``: steps × heads, the mean over examples and rows of each row's entropy in bits."""
    with shown.lock:
        kept = {int(r.step): r for r in shown.run.tensors(site) if _is_map(r)}
        steps = [list(kept)[start] for start in buckets(len(kept), _STEPS)]
        if any(int(np.prod(kept[step].shape)) > _VALUES for step in steps):
            raise Refused("these attention maps are too large to summarise", 413)
        maps = [np.asarray(shown.tensor(site, step, "value"), dtype=np.float64) for step in steps]
        revision = shown.revision
    if not maps:
        raise Refused(f"no attention was recorded at {site!r}", 404)
    rows = [_entropy_by_head(weights) for weights in maps]
    heads = min(map(len, rows))
    facts = {"site": site, "heads": heads, "places": int(maps[-1].shape[-1]), "revision": revision}
    entropy = np.stack([row[:heads] for row in rows])
    return pack(facts, {"entropy": entropy, "steps": np.array(steps, dtype=np.float64)})


def _is_map(reference: TensorRef) -> bool:
    whole = reference.field == "value" and "histogram" not in str(reference.reduction)
    return whole and 2 <= len(reference.shape) <= 16


def _entropy_by_head(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    folded = weights.reshape(-1, *weights.shape[-3:]) if weights.ndim >= 3 else weights[None, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -np.where(folded > 0, folded * np.log2(folded), 0.0).sum(axis=-1)
    bits[~np.isfinite(folded).all(axis=-1)] = np.nan
    found: npt.NDArray[np.float64] = bits.mean(axis=(0, 2))
    return found


_MOST_DIMENSIONS = 16
_MOST_CELLS = 1 << 20
_MOST_STACKED = 64
_SPANNED = 12
_SPAN_BYTES = 64 << 20


@final
@dataclass(frozen=True, slots=True)
class SliceWindow:
    """Which slice: the axes that go down and across, where the other axes stand, and the part of it."""

    step: int | None = None
    field: str = "value"
    down: int | None = None  # None: the last axis but one
    across: int | None = None  # None: the last axis
    stack: int | None = None  # one picture for each place along this axis
    index: tuple[int, ...] = ()  # a place for every axis; those of the picture's axes are not looked at
    first_row: int = 0
    last_row: int | None = None
    first_column: int = 0
    last_column: int | None = None
    size: int = 512  # most rows and columns of one picture


def tensors_of(shown: OpenRun, site: str) -> bytes:
    """The tensors recorded at ``site``, by field, with the steps of each."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[int]] = {}
    with shown.lock:
        for reference in shown.run.tensors(site):
            shape = tuple(int(n) for n in reference.shape[: _MOST_DIMENSIONS + 1])
            key = (reference.field, str(reference.reduction), shape, str(reference.dtype))
            groups.setdefault(key, []).append(int(reference.step))
    listed = [
        {"field": field, "reduction": reduction, "shape": list(shape), "dtype": dtype, "steps": sorted(steps)}
        for (field, reduction, shape, dtype), steps in groups.items()
    ]
    return encode_json({"site": site, "tensors": listed})


def span_of(shown: OpenRun, site: str, field: str) -> bytes:
    """The least and the greatest value of a tensor over time, so that colours mean the same at every step.

    Of at most `_SPANNED` steps, the first and the last among them.
    """
    with shown.lock:
        kept = {int(r.step): r for r in shown.run.tensors(site) if r.field == field}
        known = shown.remember(
            ("span", site, field), lambda: _tensors_span(shown, site, field, list(kept.items()))
        )
    return encode_json({"least": known[0], "greatest": known[1]})


def _tensors_span(
    shown: OpenRun, site: str, field: str, kept: list[tuple[int, TensorRef]]
) -> tuple[float | None, float | None]:
    each = max((reference.nbytes for _, reference in kept), default=1)
    most = max(1, min(_SPANNED, _SPAN_BYTES // max(1, each)))
    chosen = {int(i) for i in np.linspace(0, len(kept) - 1, most)} if kept else set()
    least, greatest = np.inf, -np.inf
    for step, _ in [kept[i] for i in sorted(chosen)]:
        values = shown.tensor(site, step, field)
        values = np.abs(values) if values.dtype.kind == "c" else values
        finite = values[np.isfinite(values)]
        if len(finite):
            least, greatest = min(least, float(finite.min())), max(greatest, float(finite.max()))
    return (None, None) if least > greatest else (least, greatest)


def _axis(value: int | None, default: int, dimensions: int) -> int:
    axis = default if value is None else value
    if not 0 <= axis < dimensions:
        raise Refused(f"axis {axis} of a tensor with {dimensions} axes")
    return axis


def _numbers(values: np.ndarray) -> np.ndarray:
    """As float32 or, where that would round, float64; complex numbers as their magnitude."""
    if values.dtype.kind == "c":
        values = np.abs(values)
    single = values.dtype.itemsize <= (4 if values.dtype.kind == "f" else 2)
    return np.ascontiguousarray(values, dtype="<f4" if single else "<f8")


def _drawable(shown: OpenRun, site: str, step: int | None, field: str) -> np.ndarray:
    with shown.lock:
        if site not in shown.position:
            raise Refused(f"the run {shown.name!r} has no site {site!r}", 404)
        for reference in shown.run.tensors(site):
            if len(reference.shape) > _MOST_DIMENSIONS:
                raise Refused(f"a tensor of {len(reference.shape):,} axes cannot be drawn", 413)
        return shown.tensor(site, step, field)


def _difference(tensor: np.ndarray, other: np.ndarray) -> np.ndarray:
    if tensor.shape != other.shape:
        raise Refused(f"a tensor of shape {tensor.shape} and one of shape {other.shape} have no difference")
    wide = np.result_type(tensor.dtype, other.dtype, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        difference: np.ndarray = tensor.astype(wide) - other.astype(wide)
    return difference


def slice_of(
    shown: OpenRun, site: str, window: SliceWindow, minus: tuple[OpenRun, int | None] | None = None
) -> bytes:
    """One picture of a tensor (or one for each place along ``stack``): arrays low and high.

    ``minus``: of the difference to the same site of a run at a step.
    """
    tensor = _drawable(shown, site, window.step, window.field)
    if minus is not None:
        tensor = _difference(tensor, _drawable(minus[0], site, minus[1], window.field))
    shape = tuple(tensor.shape)
    flat = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor
    axes = _axes(window, flat.ndim)
    picture = flat[_where(window, axes, flat.shape)]
    # The axes that are left, in the order stack, down, across.
    left = sorted(axis for axis in axes if axis is not None)
    picture = picture.transpose([left.index(axis) for axis in axes if axis is not None])
    if axes.stack is None:
        picture = picture[np.newaxis]
    if picture.size == 0:
        raise Refused("this tensor is empty", 404)
    if picture.size > 64 * _MOST_CELLS:
        raise Refused(f"a slice of {picture.size:,} values is too large to draw; choose a smaller part", 413)
    return _encode(picture, shape, window)


class _Axes(NamedTuple):
    """Which axes of a tensor a picture shows; stack is None where there is one picture."""

    stack: int | None
    down: int
    across: int


def _axes(window: SliceWindow, dimensions: int) -> _Axes:
    across = _axis(window.across, dimensions - 1, dimensions)
    down = _axis(window.down, dimensions - 2, dimensions)
    stack = None if window.stack is None else _axis(window.stack, 0, dimensions)
    if across == down or stack in (across, down):
        raise Refused("a picture needs two different axes, and a stack a third")
    return _Axes(stack, down, across)


def _where(window: SliceWindow, axes: _Axes, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """The part of a tensor that a picture shows."""
    parts: dict[int | None, slice] = {
        axes.stack: slice(0, _MOST_STACKED),
        axes.down: slice(window.first_row, window.last_row),
        axes.across: slice(window.first_column, window.last_column),
    }
    places = list(window.index) + [0] * (len(shape) - len(window.index))
    where: list[int | slice] = []
    for axis, length in enumerate(shape):
        place = places[axis]
        if axis not in parts and not 0 <= place < max(1, length):
            raise Refused(f"index {place} of axis {axis}, which has {length} places")
        where.append(parts.get(axis, place))
    return tuple(where)


def _encode(picture: np.ndarray, shape: tuple[int, ...], window: SliceWindow) -> bytes:
    values = _numbers(picture)
    rows, columns = int(values.shape[1]), int(values.shape[2])
    facts: dict[str, Any] = {
        "shape": list(shape),
        "pictures": int(values.shape[0]),
        "rows": rows,
        "columns": columns,
        "firstRow": window.first_row,
        "firstColumn": window.first_column,
    }
    finite = values[np.isfinite(values)]
    if len(finite):
        facts["least"], facts["greatest"] = float(finite.min()), float(finite.max())
    facts["nans"] = int(np.isnan(values).sum())
    facts["infs"] = int(np.isinf(values).sum())
    if rows <= window.size and columns <= window.size:
        facts |= {"exact": True, "cellRows": rows, "cellColumns": columns}
        return pack(facts, {"low": values})
    cells = [extremes(plane, window.size, window.size) for plane in values]
    low, high = np.stack([cell[0] for cell in cells]), np.stack([cell[1] for cell in cells])
    facts |= {"exact": False, "cellRows": int(low.shape[1]), "cellColumns": int(low.shape[2])}
    return pack(facts, {"low": low, "high": high})


def _relative(
    target: npt.NDArray[np.floating], reference: npt.NDArray[np.floating]
) -> npt.NDArray[np.floating]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(target == reference, 0.0, (target - reference) / np.abs(reference))


def grid_difference(mine: NumberGrid, other: NumberGrid, *, relative: bool) -> NumberGrid:
    """Return ``mine`` minus ``other`` at the sites and steps that both have."""
    sites, steps, (a, b) = _shared([mine, other])
    with np.errstate(invalid="ignore"):
        values = _relative(a, b) if relative else a - b
    return NumberGrid(sites, steps, values.astype(np.float32))


def mean_grid(grids: Sequence[NumberGrid]) -> NumberGrid:
    """Return the mean over runs at the sites and steps that all of them have; NaN if one of them is NaN there."""
    sites, steps, values = _shared(grids)
    return NumberGrid(sites, steps, np.mean(values, axis=0, dtype=np.float32))


def _shared(
    grids: Sequence[NumberGrid],
) -> tuple[list[str], npt.NDArray[np.int64], list[npt.NDArray[np.float32]]]:
    """Return the sites and steps that all grids have, and each grid's values there."""
    sites = [site for site in grids[0].sites if all(site in grid.row for grid in grids[1:])]
    if not sites:
        raise Refused("the runs have no site in common with this statistic", 404)
    steps = reduce(np.intersect1d, [grid.steps for grid in grids])
    if not len(steps):
        raise Refused("the runs have no step in common", 404)
    parts = []
    for grid in grids:
        rows, columns = [grid.row[site] for site in sites], np.searchsorted(grid.steps, steps)
        parts.append(grid.values[rows][:, columns])
    return sites, steps, parts


def changes_between(
    before: OpenRun, after: OpenRun, statistic: str, kind: str, first: int | None, second: int | None
) -> bytes:
    """One statistic of every site at step ``first`` of one run and step ``second`` of the other.

    A step that a site was not recorded at stands for the last one before it that was. Arrays: before, after,
    difference, relative, the steps that the numbers are of, and how many values of each were not finite.
    """
    mine, other = before.grid(statistic), after.grid(statistic)
    sites = [site for site in mine.sites if site in other.row and (not kind or Name.read(site).kind == kind)]
    if not sites:
        raise Refused("no site has this statistic in both", 404)
    a, a_steps, a_bad = _at(before, statistic, sites, first)
    b, b_steps, b_bad = _at(after, statistic, sites, second)
    with np.errstate(invalid="ignore"):
        difference, relative = b - a, _relative(b, a)
    return pack(
        {"statistic": statistic, "sites": sites, "revision": before.revision},
        {
            "before": a,
            "after": b,
            "difference": difference.astype(np.float64),
            "relative": relative.astype(np.float64),
            "beforeSteps": a_steps,
            "afterSteps": b_steps,
            "beforeBad": a_bad,
            "afterBad": b_bad,
        },
    )


def _at(
    shown: OpenRun, statistic: str, sites: list[str], step: int | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return each site's newest record up to ``step`` (None: the last), its step, and how many NaNs and infs it had.

    A recorded NaN is the newest record; a site without any record has NaN as its step.
    """
    with shown.lock:
        grid, there = shown.grid(statistic), shown.recorded(statistic)
        bad = _grid_or_none(shown, "nonfinite")
    end = len(grid.steps) if step is None else int(np.searchsorted(grid.steps, step, side="right"))
    values, steps, counts = (np.full(len(sites), np.nan) for _ in range(3))
    for number, site in enumerate(sites):
        row = grid.row[site]
        recorded = np.flatnonzero(there[row, :end])
        if not len(recorded):
            continue
        at = recorded[-1]
        values[number], steps[number] = grid.values[row, at], grid.steps[at]
        if bad is not None and site in bad.row and np.array_equal(bad.steps, grid.steps):
            counts[number] = bad.values[bad.row[site], at]
    return values, steps, counts


def column_of(shown: OpenRun, statistic: str, kind: str, step: int | None) -> bytes:
    """One statistic of every site at one step: arrays values, steps (of the records) and bad, as `changes_between`."""
    sites = [site for site in _sites_with(shown, statistic, kind) if site in shown.grid(statistic).row][
        :_MOST_SITES
    ]
    if not sites:
        raise Refused("no site of this kind has this statistic", 404)
    values, steps, bad = _at(shown, statistic, sites, step)
    facts = {"statistic": statistic, "sites": sites, "revision": shown.revision}
    return pack(facts, {"values": values, "steps": steps, "bad": bad})


_MOST = 4096  # ranks
_ROWS = 256  # of a map; further ranks share one
_CELLS = 100_000  # of a map of a site
_MOST_SITES = 4000
_NUMBERS = 2_000_000  # of a map of a step


def ranks_of(shown: OpenRun, site: str, statistic: str, columns: int = 600) -> bytes:
    """Arrays low and high of the finite values, there and bad (not finite): ranks × steps.

    Of many ranks, neighbours share a row.
    """
    with shown.lock:
        ranks = _ranks(shown)
        found = {}
        for rank in ranks:
            run = _rank(shown, rank)
            if site in run.sites() and statistic in run.statistics(site):
                found[rank] = run.series(site, statistic)
        revision = shown.revision
    if not found:
        raise Refused(f"no rank has the statistic {statistic!r} of {site!r}", 404)
    steps = np.unique(np.concatenate([series.steps for series in found.values()]))
    values = np.full((len(ranks), len(steps)), np.nan)
    recorded = np.zeros_like(values)
    for row, rank in enumerate(ranks):
        if rank in found:
            at = np.searchsorted(steps, found[rank].steps)
            values[row, at], recorded[row, at] = found[rank].values, 1
    rows = min(len(ranks), _ROWS)
    across = min(columns, _CELLS // rows)
    low, high, first, starts = extremes(np.where(np.isfinite(values), values, np.nan), rows, across)
    there = extremes(recorded, rows, across)[1]
    bad = extremes(recorded * ~np.isfinite(values), rows, across)[1]
    shown_ranks = [ranks[row] for row in first.tolist()]
    facts = {"site": site, "ranks": shown_ranks, "total": len(steps), "revision": revision}
    masks = {"there": there.astype(np.uint8), "bad": bad.astype(np.uint8)}
    return pack(facts, {"low": low, "high": high, **masks, "steps": steps[starts].astype(np.float64)})


def ranks_at(shown: OpenRun, statistic: str, kind: str, step: int | None) -> bytes:
    """Array values: sites × ranks at one step (None: the last that was recorded), NaN where a rank has nothing.

    ``shares`` states for each site what its ranks hold: the same, or parts. Ranks that hold the same and have
    other numbers have gone different ways.
    """
    with shown.lock:
        ranks = _ranks(shown)
        sites = _sites_with(shown, statistic, kind)[: min(_MOST_SITES, _NUMBERS // len(ranks))]
        steps = shown.run.steps()
        if not sites or not len(steps):
            raise Refused("no site of this kind has this statistic", 404)
        at = int(steps[-1]) if step is None else step
        columns = [_column(_rank(shown, rank), statistic, sites, at) for rank in ranks]
        expected = _expected_ranks(shown.run)
        facts = {
            "statistic": statistic,
            "step": at,
            "ranks": ranks,
            "absent": [rank for rank in range(min(expected, _MOST)) if rank not in set(ranks)],
            "statuses": [str(shown.run.statuses.get(rank, "")) for rank in ranks],
            "sites": [browser_text(site) for site in sites],
            "shares": [_share(shown.run, site) for site in sites],
            "revision": shown.revision,
        }
    values, there = (np.stack([column[part] for column in columns], axis=1) for part in (0, 1))
    return pack(facts, {"values": values, "there": there.astype(np.uint8)})


def _expected_ranks(run: Run) -> int:
    """Return the number of ranks that the launch had, as far as the run knows it."""
    world = run.manifest.get("world")
    size = world.get("size") if isinstance(world, Mapping) else world
    return size if isinstance(size, int) else 0


def _sites_with(shown: OpenRun, statistic: str, kind: str) -> list[str]:
    """The sites of a kind, or of any where none is named, that have a statistic."""
    found = [site for site in shown.sites if statistic in shown.statistics[site]]
    return [site for site in found if Name.read(site).kind == kind] if kind else found


def _column(
    run: Run, statistic: str, sites: list[str], step: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return a statistic of these sites at a step as one rank recorded it, and which of them it recorded."""
    values, recorded = np.full(len(sites), np.nan), np.zeros(len(sites), dtype=bool)
    there = set(run.sites())
    rows = [row for row, site in enumerate(sites) if site in there and statistic in run.statistics(site)]
    if rows:
        chosen = [sites[row] for row in rows]
        values[rows] = run.matrix(statistic, chosen, [step], partial=True).values[:, 0]
        recorded[rows] = ~np.isnan(values[rows])
    for row in rows:
        if not recorded[row]:  # a NaN that was recorded, or nothing
            recorded[row] = step in run.series(sites[row], statistic, partial=True).steps
    return values, recorded


def _ranks(shown: OpenRun) -> list[int]:
    ranks = shown.run.ranks[:_MOST]
    if len(ranks) < 2:
        raise Refused("one rank wrote this run", 404)
    return ranks


def _rank(shown: OpenRun, rank: int) -> Run:
    return shown.remember(("rank", str(rank)), lambda: shown.run.rank(rank))


def _share(run: Run, site: str) -> str:
    """Return what the ranks of a site hold: ``same``, ``parts``, or an empty text if the placement is unknown."""
    placement = run.placement(site)
    if placement is None or not placement.known:
        return ""
    shared = any(axis.size > 1 and axis.share.kind != "replicate" for axis in placement.axes)
    return "parts" if shared else "same"
