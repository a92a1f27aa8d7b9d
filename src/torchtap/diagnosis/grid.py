"""The numbers of a run as the checks want them: a site's facts, and one statistic as a grid.

Guarantees: a statistic that no site has is an empty grid, not an error; sites come in execution order.

Not here: judging (`checks`, `spread`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from torchtap.names import read_name, site_name

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["Grid", "Place", "grid", "places", "spread_steps"]


@final
@dataclass(frozen=True, slots=True)
class Place:
    """What is known of a site without reading its numbers."""

    name: str
    index: int  # in execution order
    module: str
    kind: str
    leaf: str
    module_class: str
    source: str
    shape: tuple[int, ...] | None
    dtype: str


@final
@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """One statistic: rows are sites, columns steps, NaN where nothing was recorded."""

    sites: list[str]
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.floating[Any]]


def _shape(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 64 or not all(isinstance(n, int) for n in value):
        return None
    return tuple(value)


def places(run: Run) -> list[Place]:
    """Every site of the run in execution order."""
    described = run.site_facts()
    names = run.sites()
    found = []
    for index, name in enumerate(names):
        module, kind, leaf, _ = read_name(name)
        # A leaf or a further call is not in the plan by its own name; its module is.
        facts = {**described.get(site_name(module, kind), {}), **described.get(name, {})}
        found.append(
            Place(
                name,
                index,
                str(facts.get("module") or module),
                kind,
                leaf,
                str(facts.get("class") or ""),
                str(facts.get("source") or ""),
                _shape(facts.get("shape")),
                str(facts.get("dtype") or ""),
            )
        )
    return found


def grid(run: Run, statistic: str, sites: list[str], steps: npt.NDArray[np.int64] | None = None) -> Grid:
    """``statistic`` of those of ``sites`` that have it."""
    having = [site for site in sites if statistic in run.statistics(site)]
    if not having:
        return Grid([], np.zeros(0, np.int64), np.zeros((0, 0)))
    names, columns, values = run.matrix(statistic, sites=having, steps=steps)
    return Grid(list(names), np.asarray(columns), np.asarray(values))


def spread_steps(run: Run, most: int, before: int | None = None) -> npt.NDArray[np.int64]:
    """At most ``most`` of the run's steps, evenly spread, the first and the last among them.

    Steps from ``before`` on are left out, unless nothing else is there.
    """
    steps = np.asarray(run.steps(), dtype=np.int64)
    if before is not None and len(steps) and steps[0] < before:
        steps = steps[steps < before]
    if len(steps) <= most:
        return steps
    return steps[np.unique(np.linspace(0, len(steps) - 1, most).round().astype(np.int64))]
