"""Which sites and which statistic a picture shows when nobody said: shared by figures, notebook and terminal."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import places
from torchtap.errors import SelectionError

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["Picture", "matching_sites", "picture_of", "usual_statistic"]

_USUAL = ("rms", "std", "l2", "absmax", "mean")
_KINDS = ("output", "grad_output", "param_grad", "param", "input", "grad_input", "value")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One statistic of some sites, in execution order against steps."""

    statistic: str
    sites: list[str]
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    broken: npt.NDArray[np.bool_]  # where NaN or an infinity was recorded


def usual_statistic(names: Sequence[str]) -> str:
    """The statistic that tells most about a site that has ``names``."""
    return next((name for name in _USUAL if name in names), names[0] if names else "std")


def matching_sites(run: Run, patterns: Sequence[str] | None, kind: str | None = None) -> list[str]:
    """Sites in execution order: those that match any pattern (``blocks.*:output``), else those of a kind,
    else those of the first kind that was recorded."""
    listed = places(run)
    if patterns:
        found = [place.name for place in listed if _matches(place.name, patterns)]
        if not found:
            raise SelectionError(f"none of the run's {len(listed)} sites matches {', '.join(patterns)}")
        return found
    there = sorted({place.kind for place in listed})
    if kind and kind not in there:
        raise SelectionError(f"the run has no sites of kind {kind!r}; it has {', '.join(there)}")
    wanted = kind or next((k for k in (*_KINDS, *there) if k in there), "")
    return [place.name for place in listed if place.kind == wanted]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def picture_of(
    run: Run, statistic: str | None = None, sites: Sequence[str] | None = None, kind: str | None = None
) -> Picture:
    """The numbers of a picture."""
    names = matching_sites(run, sites, kind)
    held = {site: run.statistics(site) for site in names}
    if statistic is None:
        statistic = usual_statistic(next((list(s) for s in held.values() if s), []))
    having = [site for site in names if statistic in held[site]]
    if not having:
        raise SelectionError(f"none of these sites has a statistic {statistic!r}")
    matrix = run.matrix(statistic, sites=having)
    values, steps = np.asarray(matrix.values), np.asarray(matrix.steps)
    return Picture(statistic, list(matrix.sites), steps, values, _broken(run, having, steps, held))


def _broken(
    run: Run, sites: list[str], steps: npt.NDArray[np.int64], held: dict[str, list[str]]
) -> npt.NDArray[np.bool_]:
    """Where something that is not finite was recorded: counted, or a logged value that is it itself."""
    found = np.zeros((len(sites), len(steps)), dtype=bool)
    for name in ("nans", "infs"):
        rows = [row for row, site in enumerate(sites) if name in held[site]]
        if rows:
            counts = run.matrix(name, [sites[row] for row in rows], steps).values
            found[rows] |= np.nan_to_num(counts) > 0
    for row, site in enumerate(sites):
        if "value" in held[site]:
            series = run.series(site, "value")
            there = np.isin(series.steps, steps) & ~np.isfinite(series.values)
            found[row, np.searchsorted(steps, series.steps[there])] = True
    return found
