"""The numbers of a run that invariants are about, as grids of sites and steps, phase by phase. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.reading import chosen
from torchtap.diagnosis.rules.rank_progress import SECONDS
from torchtap.plan.names import kind_of

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = [
    "COUNTS",
    "LOGGED",
    "RANGED",
    "SIZES",
    "PhaseNumbers",
    "as_ratio",
    "numbers_of",
    "on_scale",
    "window_of",
]

SIZES = ("rms", "std", "absmax")  # never negative, and compared by their ratio
LOGGED = "value"
RANGED = (*SIZES, LOGGED)
COUNTS = ("count", "nans", "infs")  # compared exactly

Grid = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@final
@dataclass(frozen=True)
class PhaseNumbers:
    """One phase of a run: ``grids[statistic][site, step]``, NaN where nothing was recorded."""

    sites: tuple[str, ...]
    steps: npt.NDArray[np.int64]
    grids: dict[str, Grid]

    def rows(self) -> dict[str, int]:
        """The row of each site."""
        return {site: row for row, site in enumerate(self.sites)}

    def came(self) -> npt.NDArray[np.bool_]:
        """Where something was recorded."""
        found = np.zeros((len(self.sites), len(self.steps)), np.bool_)
        for grid in self.grids.values():
            found |= ~np.isnan(grid)
        return found

    def missed(self) -> npt.NDArray[np.bool_]:
        """Where a site did not come though others of its kind did."""
        came = self.came()
        kinds = np.array([kind_of(site) for site in self.sites])
        missed = np.zeros_like(came)
        for kind in set(kinds.tolist()):
            own = kinds == kind
            missed[own] = came[own].any(0) & ~came[own]
        return missed


def numbers_of(run: Run) -> dict[str, PhaseNumbers]:
    """Each phase of a run. Of a very long run, steps that are evenly spread."""
    steps = chosen(np.asarray(run.steps(), np.int64))
    # How long a step takes is the machine's doing.
    statistics_of = {site: run.statistics(site) for site in run.sites() if site != SECONDS}
    found = {}
    for phase in run.phases:
        grids = {
            statistic: _grid(run, statistic, phase, steps, statistics_of)
            for statistic in (*RANGED, *COUNTS)
            if any(statistic in has for has in statistics_of.values())
        }
        numbers = PhaseNumbers(tuple(statistics_of), steps, grids)
        came = numbers.came()
        rows, columns = np.asarray(came.any(1)), np.asarray(came.any(0))
        found[phase] = PhaseNumbers(
            tuple(site for site, has in zip(numbers.sites, rows.tolist(), strict=True) if has),
            steps[columns],
            {name: grid[rows][:, columns] for name, grid in grids.items()},
        )
    return found


def _grid(
    run: Run, statistic: str, phase: str, steps: npt.NDArray[np.int64], statistics_of: dict[str, list[str]]
) -> Grid:
    has = np.array([statistic in own for own in statistics_of.values()])
    names = [site for site, own in statistics_of.items() if statistic in own]
    grid = np.full((len(statistics_of), len(steps)), np.nan)
    grid[has] = np.asarray(run.matrix(statistic, sites=names, steps=steps, phase=phase, partial=True)[2])
    return grid


def on_scale(statistic: str, values: object) -> Grid:
    """The scale that ranges and margins are on: ratios for sizes, differences for logged numbers."""
    return as_ratio(values) if statistic in SIZES else np.asarray(values, np.float64)


def as_ratio(values: Any) -> Grid:
    """Numbers whose differences are ratios."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(np.asarray(values, np.float64))


def window_of(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The stretch of a training that a step is in: 0, 1, 2 to 3, 4 to 7, and so on: it changes fastest at first."""
    return np.ceil(np.log2(np.maximum(steps, 0) + 1.0)).astype(np.int64)
