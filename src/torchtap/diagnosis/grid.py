"""The numbers of a run as the checks want them: a site's facts, and one statistic as a grid.

Guarantees: a statistic that no site has is an empty grid, not an error; sites come in execution order.

Not here: judging (`checks`, `spread`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torchtap.store.reader import Run

__all__ = ["Grid", "Place", "grid", "places", "spread_steps"]


@final
@dataclass(frozen=True, slots=True)
class Place:
    """What is known of a site without reading its numbers."""

    name: str
    index: int  # in execution order
    kind: str
    leaf: str
    module_class: str
    dtype: str


@final
@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """One statistic: rows are sites, columns steps, NaN where nothing was recorded."""

    sites: list[str]
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.floating[Any]]


def _split(name: str) -> tuple[str, str]:
    """Kind and leaf of a site's name, whatever else the name holds."""
    _, _, tail = name.rpartition(":")
    kind, _, leaf = tail.partition("#")[0].partition(".")
    return kind, leaf


def places(run: Run) -> list[Place]:
    """Every site of the run in execution order."""
    facts = {}
    listed = run.manifest.get("sites")
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            facts[entry["name"]] = entry
    found = []
    for index, name in enumerate(run.sites()):
        kind, leaf = _split(name)
        entry = facts.get(name, {})
        found.append(
            Place(name, index, kind, leaf, str(entry.get("class") or ""), str(entry.get("dtype") or ""))
        )
    return found


def grid(
    run: Run, statistic: str, sites: list[str], steps: npt.NDArray[np.int64] | None = None
) -> Grid:
    """``statistic`` of those of ``sites`` that have it."""
    having = [site for site in sites if statistic in run.statistics(site)]
    if not having:
        return Grid([], np.zeros(0, np.int64), np.zeros((0, 0)))
    names, columns, values = run.matrix(statistic, sites=having, steps=steps)
    return Grid(list(names), np.asarray(columns), np.asarray(values))


def spread_steps(run: Run, most: int) -> npt.NDArray[np.int64]:
    """At most ``most`` of the run's steps, evenly spread, the first and the last among them."""
    steps = np.asarray(run.steps(), dtype=np.int64)
    if len(steps) <= most:
        return steps
    return steps[np.unique(np.linspace(0, len(steps) - 1, most).round().astype(np.int64))]
