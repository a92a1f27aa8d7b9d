"""What changed: between two runs over all steps, and between two steps, site by site.

A difference is target minus reference. Relative, it is divided by the reference's magnitude; where that is zero and
the target is not, it is infinite, and the page says so.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchtap.plan.names import kind_of
from torchtap.viewer.opened import NumberGrid, OpenRun, Refused
from torchtap.viewer.wire import pack

__all__ = ["changes_between", "difference_grid"]


def _relative(
    target: npt.NDArray[np.floating], reference: npt.NDArray[np.floating]
) -> npt.NDArray[np.floating]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(target == reference, 0.0, (target - reference) / np.abs(reference))


def difference_grid(target: OpenRun, reference: OpenRun, statistic: str, *, relative: bool) -> NumberGrid:
    """``target`` minus ``reference`` at the sites and steps that both have."""
    mine, other = target.grid(statistic), reference.grid(statistic)
    sites = [site for site in mine.sites if site in other.row]
    if not sites:
        raise Refused("the two runs have no site in common with this statistic", 404)
    steps, left, right = np.intersect1d(mine.steps, other.steps, assume_unique=True, return_indices=True)
    if not len(steps):
        raise Refused("the two runs have no step in common", 404)
    a = mine.values[[mine.row[site] for site in sites]][:, left]
    b = other.values[[other.row[site] for site in sites]][:, right]
    with np.errstate(invalid="ignore"):
        values = _relative(a, b) if relative else a - b
    return NumberGrid(sites, steps, values.astype(np.float32))


def changes_between(
    before: OpenRun, after: OpenRun, statistic: str, kind: str, first: int | None, second: int | None
) -> bytes:
    """One statistic of every site at step ``first`` of one run and step ``second`` of the other.

    A step that a site was not recorded at stands for the last one before it that was. Arrays: before, after,
    difference, relative, and the steps that the numbers are of.
    """
    mine, other = before.grid(statistic), after.grid(statistic)
    sites = [site for site in mine.sites if site in other.row and (not kind or kind_of(site) == kind)]
    if not sites:
        raise Refused("no site has this statistic in both", 404)
    a, a_steps = _at(mine, sites, first)
    b, b_steps = _at(other, sites, second)
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
        },
    )


def _at(
    grid: NumberGrid, sites: list[str], step: int | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Each site's newest value up to ``step`` (None: the last), and the step that it is of."""
    end = len(grid.steps) if step is None else int(np.searchsorted(grid.steps, step, side="right"))
    values = np.full(len(sites), np.nan)
    steps = np.full(len(sites), np.nan)
    for number, site in enumerate(sites):
        row = grid.values[grid.row[site], :end]
        there = np.flatnonzero(~np.isnan(row))
        if len(there):
            values[number], steps[number] = row[there[-1]], grid.steps[there[-1]]
    return values, steps
