"""The histograms of a site over time, as densities on one common axis.

A histogram without a range has bins of powers of two. Drawn equally wide they make a bell look like two peaks, so
the counts are spread onto equal bins of a linear axis, each bin's mass evenly over its width. The axis holds all but
one value in a thousand at each end; what lies beyond is told.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchtap.viewer.downsample import buckets
from torchtap.viewer.opened import OpenRun, Refused
from torchtap.viewer.wire import pack

__all__ = ["histograms_of"]

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
