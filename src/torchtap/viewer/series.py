"""A site over time: its series with every extreme kept, and its histograms on one common axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchtap.viewer.catalog import OpenRun, Refused
from torchtap.viewer.derived import DERIVED
from torchtap.viewer.downsample import buckets, keep_points
from torchtap.viewer.wire import pack

__all__ = ["histograms_of", "series_of"]

_BINS = 96
_LARGEST_HISTOGRAM = 1 << 20  # bytes


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
        recorded = shown.statistics[site]
        columns: dict[str, npt.NDArray[np.float64]] = {}
        steps = np.zeros(0, dtype=np.int64)
        for name in dict.fromkeys(statistics):
            if name in recorded:
                its_steps, values = shown.run.series(site, name)
            elif name in DERIVED and site in shown.grid(name).row:
                grid = shown.grid(name)
                its_steps, values = grid.steps, grid.values[grid.row[site]].astype(np.float64)
            else:
                continue
            its_steps, values = np.asarray(its_steps, np.int64), np.asarray(values, np.float64)
            if not columns:
                steps = its_steps
            elif not np.array_equal(steps, its_steps):
                merged = np.union1d(steps, its_steps)
                columns = {key: _onto(merged, steps, column) for key, column in columns.items()}
                values, steps = _onto(merged, its_steps, values), merged
            columns[name] = values
        total = len(steps)
        inside = np.ones(total, dtype=bool)
        if first_step is not None:
            inside &= steps >= first_step
        if last_step is not None:
            inside &= steps <= last_step
        steps = steps[inside]
        columns = {key: column[inside] for key, column in columns.items()}
        kept = keep_points(list(columns.values()), max(2, points // max(1, len(columns))))
        facts = {"site": site, "statistics": list(columns), "total": total, "revision": shown.revision}
    arrays: dict[str, npt.NDArray[Any]] = {"steps": steps[kept].astype(np.float64)}
    for number, column in enumerate(columns.values()):
        arrays[f"s{number}"] = column[kept]
    return pack(facts, arrays)


def _onto(
    wanted: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    spread = np.full(len(wanted), np.nan)
    spread[np.searchsorted(wanted, steps)] = values
    return spread


def histograms_of(shown: OpenRun, site: str, columns: int = 240) -> bytes:
    """The site's histograms as densities on one axis: array ``density``, steps × bins.

    Histograms of equal edges are sent as they are, without the empty bins at both ends; others are spread
    onto a common axis in proportion. Of more than ``columns`` steps every n-th is sent, and always the last.
    """
    with shown.lock:
        kept = [r for r in shown.run.tensors(site) if "histogram" in str(r.reduction).lower()]
        if any(r.unpacked > _LARGEST_HISTOGRAM for r in kept):
            raise Refused("a histogram of this site has too many bins to draw", 413)
        steps = sorted({int(r.step) for r in kept})
        if not steps:
            return pack({"site": site, "total": 0}, {})
        chosen = [steps[start] for start in buckets(len(steps), columns)]
        if chosen[-1] != steps[-1]:
            chosen.append(steps[-1])
        found: list[tuple[int, npt.NDArray[np.float64], npt.NDArray[np.float64]]] = []
        for step in chosen:
            result = shown.run.histogram(site, step)
            counts = np.asarray(result.counts, dtype=np.float64).ravel()
            edges = np.asarray(result.edges, dtype=np.float64).ravel()
            if len(edges) == len(counts) + 1 and len(counts) and np.isfinite(edges).all():
                found.append((step, counts, edges))
        revision = shown.revision
    if not found:
        return pack({"site": site, "total": 0}, {})
    edges = found[0][2]
    if all(np.array_equal(edges, other) for _, _, other in found):
        held = np.flatnonzero(np.sum([counts for _, counts, _ in found], axis=0))
        inside = slice(held[0], held[-1] + 1) if len(held) else slice(0, len(edges) - 1)
        edges = edges[inside.start : inside.stop + 1]
        rows = [counts[inside] for _, counts, _ in found]
    else:
        filled = [edges[_filled(counts, edges)] for _, counts, edges in found if counts.any()]
        low = min((float(e.min()) for e in filled), default=float(edges[0]))
        high = max((float(e.max()) for e in filled), default=float(edges[-1]))
        edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
        rows = [_rebin(counts, own, edges) for _, counts, own in found]
    density = np.stack(rows).astype(np.float32)
    kept_steps = np.array([step for step, _, _ in found], dtype=np.float64)
    return pack(
        {"site": site, "total": len(steps), "revision": revision},
        {"density": density, "edges": edges.astype(np.float64), "steps": kept_steps},
    )


def _filled(counts: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The numbers of the outermost edges that hold something."""
    held = np.flatnonzero(counts)
    return np.array([held[0], held[-1] + 1])


def _rebin(
    counts: npt.NDArray[np.float64], own: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """``counts`` on other edges, each bin's mass spread evenly over its width."""
    below = np.interp(edges, own, np.concatenate([[0.0], np.cumsum(counts)]))
    return np.diff(below)
