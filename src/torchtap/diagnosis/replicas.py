"""Values that several ranks hold alike, and whether a weight is what its update left.

Placements that ranks recorded state what is replicated. Without them (a model spread by hand) the first step decides: a
parameter with the same numbers on every rank is one parameter, unless another parameter of its module is not.

The projection of a weight plus that of its update is the projection of the next step's weight, up to rounding: the
projection is linear. If it is not, something other than the optimizer changed the weight. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import Chart, ChartedSite, Numbers
from torchtap.diagnosis.rule_type import Flags
from torchtap.placement import Placement
from torchtap.plan.names import read_name, site_name

__all__ = ["Course", "Replicas", "common_steps", "course_of", "jumped", "replicas", "values_on_ranks"]


_PRINT = ("mean", "l1", "l2", "absmax", "fingerprint")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """One site on ranks that hold the same of it."""

    place: ChartedSite
    ranks: tuple[int, ...]
    stated: bool  # whether the placement says so
    prints: Numbers  # rank, statistic, step
    seen: Flags  # the steps at which every rank has numbers
    same: Flags  # those at which all have the same

    @property
    def same_at_first(self) -> bool:
        """Return True if the ranks began with the same."""
        return bool(len(self.seen) and self.seen[0] and self.same[0])

    @property
    def apart(self) -> Flags:
        """The steps at which ranks differ."""
        return self.seen & ~self.same

    def alone(self, column: int) -> int | None:
        """The one rank unlike the rest, which agree; of two that differ nobody can say which is right."""
        if len(self.ranks) < 3:
            return None
        at = self.prints[:, :, column]
        for index, rank in enumerate(self.ranks):
            rest = np.delete(at, index, axis=0)
            if (rest == rest[:1]).all() and (at[index] != rest[0]).any():
                return rank
        return None


def common_steps(chart: Chart) -> npt.NDArray[np.int64]:
    """The steps that every rank recorded."""
    charts = list(chart.ranks.values())
    steps = charts[0].steps
    for other in charts[1:]:
        steps = np.intersect1d(steps, other.steps)
    return steps


def values_on_ranks(chart: Chart, kind: str, statistic: str) -> dict[int, dict[str, Numbers]]:
    """By rank and site: one statistic at the common steps."""
    steps = common_steps(chart)
    found: dict[int, dict[str, Numbers]] = {}
    for rank, own in chart.ranks.items():
        grid = own.grid(statistic, kind)
        columns = np.searchsorted(grid.steps, steps)
        found[rank] = {
            place.name: row for place, row in zip(grid.places, grid.values[:, columns], strict=True)
        }
    return found


def replicas(chart: Chart, kind: str) -> list[Replicas]:
    """The sites of a kind that several ranks hold alike, in execution order."""
    steps = common_steps(chart)
    if not len(steps):
        return []
    tables = [values_on_ranks(chart, kind, statistic) for statistic in _PRINT]
    places: dict[str, ChartedSite] = {}
    holders: dict[str, list[int]] = {}
    for rank, own in chart.ranks.items():
        for place in own.grid("l2", kind).places:
            places.setdefault(place.name, place)
            holders.setdefault(place.name, []).append(rank)
    found = []
    for name, ranks in holders.items():
        for group, stated in _groups(chart, name, ranks):
            rows = [[table[rank].get(name) for table in tables] for rank in group]
            found.append(_beside(places[name], group, stated, rows, len(steps)))
    return _without_shards(found) if kind == "param" else found


def _beside(
    place: ChartedSite,
    ranks: Sequence[int],
    stated: bool,
    rows: Sequence[Sequence[Numbers | None]],
    steps: int,
) -> Replicas:
    nothing = np.full(steps, np.nan)
    # A statistic that one of the ranks does not have says nothing.
    had = [number for number in range(len(rows[0])) if all(row[number] is not None for row in rows)]
    prints = np.array(
        [[nothing if row[n] is None else row[n] for n in had] for row in rows], np.float64
    ).reshape(len(ranks), len(had), steps)
    seen = np.asarray(np.isfinite(prints).all(axis=(0, 1)), np.bool_)
    same = np.asarray((prints == prints[:1]).all(axis=(0, 1)), np.bool_)
    return Replicas(place, tuple(ranks), stated, prints, seen, same)


def _groups(chart: Chart, site: str, ranks: Sequence[int]) -> Iterable[tuple[tuple[int, ...], bool]]:
    """The ranks that hold the same of a site, and whether anybody said so."""
    if len(ranks) < 2:
        return
    placed = {rank: chart.ranks[rank].placed(site) for rank in ranks}
    if any(each is None or not each.known for each in placed.values()):
        yield tuple(ranks), False
        return
    groups: dict[object, list[int]] = {}
    for rank, placement in placed.items():
        if placement is not None:
            groups.setdefault(_part(placement), []).append(rank)
    yield from ((tuple(group), True) for group in groups.values() if len(group) > 1)


def _part(placement: Placement) -> object:
    """What tells a part of the whole from the others."""
    divided = tuple((axis.name, axis.at) for axis in placement.axes if axis.share.kind != "replicate")
    return placement.root, divided, placement.boxes


def _without_shards(found: list[Replicas]) -> list[Replicas]:
    """Without those that only look alike at first: a bias of zeros beside a weight that every rank has a part of."""
    parts = {each.place.module for each in found if not each.stated and not each.same_at_first}
    return [
        replace(each, seen=np.zeros_like(each.seen))
        if not each.stated and each.place.module in parts and each.same_at_first and _is_constant(each)
        else each
        for each in found
    ]


def _is_constant(each: Replicas) -> bool:
    """Return True if all elements have the same size at first: zeros, or ones."""
    mean, _, _, absmax = each.prints[0, :4, 0]
    return bool(abs(mean) == absmax)


_ROUNDING = 1e-5  # of a weight's size
_OF_UPDATE = 1e-2  # of an update's, which may be kept in few bits


@final
@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """One weight on one rank: at each kept step what it was to be, what it is, and how far rounding takes it."""

    steps: npt.NDArray[np.int64]
    expected: Numbers  # NaN where the step before was not recorded
    found: Numbers
    slack: Numbers

    @property
    def jumps(self) -> npt.NDArray[np.bool_]:
        """The steps before which something else has changed it."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(self.found - self.expected) > self.slack, np.bool_)


def course_of(chart: Chart, site: str) -> Course | None:
    """The course of a parameter; None where its projections were not recorded."""
    module, _, leaf, _ = read_name(site)
    change = site_name(module, "update", leaf)
    rows = [
        chart.row(each, statistic)
        for each, statistic in ((site, "projection"), (change, "projection"), (site, "l2"), (change, "l2"))
    ]
    if any(row is None for row in rows):
        return None
    weight, update, size, moved = (np.asarray(row) for row in rows)
    steps = chart.steps
    after = np.diff(steps, prepend=steps[:1] - 2) == 1
    with np.errstate(invalid="ignore"):
        expected = np.where(after, np.roll(weight + update, 1), np.nan)
        slack = _ROUNDING * np.maximum(size, np.roll(size, 1)) + _OF_UPDATE * np.roll(moved, 1)
    return Course(steps, expected, weight, slack)


def jumped(chart: Chart, site: str, step: int) -> bool:
    """Return True if something else than the optimizer changed a parameter just before a step."""
    course = course_of(chart, site)
    if course is None:
        return False
    column = int(np.searchsorted(course.steps, step))
    return bool(course.jumps[column])
