"""Statistics that are not recorded but follow from recorded ones, under names of their own.

nonfinite     NaNs and infinities together
grad/weight   norm of a parameter's gradient over the norm of the parameter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchtap.plan.names import kind_of, read_name

if TYPE_CHECKING:
    from torchtap.viewer.opened import NumberGrid

__all__ = ["DERIVED", "EMPTY_SUMS", "derive", "derived_of", "without_empty_sums"]

DERIVED = ("nonfinite", "grad/weight")
EMPTY_SUMS = frozenset({"l1", "l2"})  # sums: zero where no value is finite


def _parameter_of(site: str) -> str:
    """The parameter whose gradient ``site`` is."""
    return str(read_name(site)._replace(kind="param"))


def without_empty_sums(
    statistic: str, values: npt.NDArray[np.float64], broken: npt.NDArray[np.float64] | None
) -> npt.NDArray[np.float64]:
    """``values`` with NaN where a norm is zero because nothing was finite; ``broken`` counts the NaNs."""
    if statistic not in EMPTY_SUMS or broken is None or len(broken) != len(values):
        return values
    return np.where((values == 0) & (broken > 0), np.nan, values)


def derived_of(site: str, statistics: list[str], sites: set[str]) -> list[str]:
    """Which derived statistics ``site`` has, given what was recorded of it."""
    found = []
    if kind_of(site) == "param_grad" and "l2" in statistics and _parameter_of(site) in sites:
        found.append("grad/weight")
    return found


def derive(
    statistic: str, grid: Callable[[str], NumberGrid], sites: list[str], recorded: set[str]
) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Sites, steps and values of a derived statistic; ``grid`` reads those that were ``recorded``."""
    if statistic == "nonfinite":
        nans = grid("nans")
        infinities = grid("infs") if "infs" in recorded else None
        if infinities is not None and nans.sites == infinities.sites:
            return nans.sites, nans.steps, nans.values + infinities.values
        return nans.sites, nans.steps, nans.values
    sizes = grid("l2")
    names = [
        s for s in sites if kind_of(s) == "param_grad" and s in sizes.row and _parameter_of(s) in sizes.row
    ]
    gradients = sizes.values[[sizes.row[s] for s in names]]
    weights = sizes.values[[sizes.row[_parameter_of(s)] for s in names]]
    with np.errstate(divide="ignore", invalid="ignore"):
        return names, sizes.steps, np.where(weights > 0, gradients / weights, np.nan).astype(np.float32)
