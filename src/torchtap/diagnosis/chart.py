"""The chart of a training: what has been recorded of it so far, as rules read it.

The same chart is filled while a training runs and from a finished run, so both are judged alike. It guarantees:
- memory does not grow with the steps: the first `EARLY` columns and the last ones are kept;
- only passes that learn are in it: an evaluation beside a step leaves no number here;
- what no record brought is NaN, and asking for it gives an empty grid, never an error.

No torch. Not here: reading a run (`reading`), listening to a training (`doctor`), judging (`rules`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.facts import Fact, Structure
from torchtap.diagnosis.places import ChartedSite, described
from torchtap.placement import Placement
from torchtap.plan.names import read_name

__all__ = ["EARLY", "Block", "Chart", "ChartGrid"]

EARLY = 32  # columns from the beginning that are never let go
_COLUMNS = 320
_LOSSES = 512  # the last ones, of each step
_LET_GO = 64  # at once, when the columns are full

Numbers = npt.NDArray[np.float64]
# sites, statistics, values[site, statistic], which sites arrived
Block = tuple[tuple[str, ...], tuple[str, ...], Numbers, npt.NDArray[np.bool_] | None]


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChartGrid:
    """One statistic: rows are places, columns steps, NaN where nothing was recorded."""

    places: list[ChartedSite]
    steps: npt.NDArray[np.int64]
    values: Numbers

    def __bool__(self) -> bool:
        return bool(self.places) and self.values.shape[1] > 0

    def recorded(self) -> ChartGrid:
        """Without the columns in which nothing of these places was recorded."""
        there = (~np.isnan(self.values)).any(axis=0)
        return self if there.all() else ChartGrid(self.places, self.steps[there], self.values[:, there])

    def step(self, column: int) -> int:
        """The step of a column."""
        return int(self.steps[column])


@final
class _Table:
    """One statistic of all sites that have it."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.data: Numbers = np.full((64, _COLUMNS), np.nan)

    def rows_of(self, sites: Sequence[str]) -> npt.NDArray[np.intp]:
        rows = self.rows
        found = np.array([rows.setdefault(site, len(rows)) for site in sites], np.intp)
        if len(rows) > len(self.data):
            more = np.full((2 * len(rows), _COLUMNS), np.nan)
            more[: len(self.data)] = self.data
            self.data = more
        return found


@final
class Chart:
    """Everything that rules may look at. ``facts_of_sites`` says what is known of the sites, by name, in order."""

    def __init__(self, facts_of_sites: Callable[[], Mapping[str, Mapping[str, object]]]) -> None:
        self._facts_of_sites = facts_of_sites
        self._tables: dict[str, _Table] = {}
        self._columns = 0
        self._steps = np.zeros(_COLUMNS, np.int64)
        self._passes = np.zeros(_COLUMNS, np.int64)
        self._skipped = np.zeros(_COLUMNS, np.bool_)
        self._known: dict[str, None] = {}  # sites that ever came
        self._rows: dict[tuple[int, str], tuple[object, npt.NDArray[np.intp]]] = {}
        self._chosen: dict[object, tuple[list[ChartedSite], npt.NDArray[np.intp]]] = {}
        self._places: tuple[int, list[ChartedSite]] = (-1, [])
        self.structure = Structure()
        self.ranks: dict[int, Chart] = {}  # of a finished run of several ranks, a chart of each
        self.ends: dict[int, str] = {}  # how each of these ranks ended: "closed", "interrupted"
        self.placed: Callable[[str], Placement | None] = lambda _: None  # which part of a site this rank has
        self._facts: dict[tuple[str, str], Fact] = {}
        self._losses: deque[tuple[int, float]] = deque(maxlen=_LOSSES)
        self.seen = 0  # columns that were ever added

    # -- filling it ---------------------------------------------------------------------------------------

    def add(self, step: int, blocks: Iterable[Block], *, passes: int = 1, skipped: bool = False) -> None:
        """One record of a step. Further records of the same step join it."""
        if not self._columns or self._steps[self._columns - 1] != step:
            self._new_column(step)
        at = self._columns - 1
        self._passes[at] = max(passes, self._passes[at])
        self._skipped[at] |= skipped
        for sites, statistics, values, present in blocks:
            for index, statistic in enumerate(statistics):
                table = self._tables.setdefault(statistic, _Table())
                rows = self._rows_of(table, statistic, sites)
                column = values[:, index]
                if present is None:
                    table.data[rows, at] = column
                else:
                    table.data[rows[present], at] = column[present]

    def _rows_of(self, table: _Table, statistic: str, sites: tuple[str, ...]) -> npt.NDArray[np.intp]:
        known = self._rows.get((id(sites), statistic))
        if known is not None and known[0] is sites:
            return known[1]
        self._known.update(dict.fromkeys(sites))
        rows = table.rows_of(sites)
        if len(self._rows) > 512:
            self._rows.clear()
        self._rows[id(sites), statistic] = (sites, rows)
        return rows

    def _new_column(self, step: int) -> None:
        if self._columns == _COLUMNS:
            kept = np.r_[0:EARLY, EARLY + _LET_GO : _COLUMNS]
            for row in (self._steps, self._passes, self._skipped):
                row[: len(kept)] = row[kept]
            for table in self._tables.values():
                table.data[:, : len(kept)] = table.data[:, kept]
                table.data[:, len(kept) :] = np.nan
            self._columns = len(kept)
        self._steps[self._columns], self._passes[self._columns] = step, 0
        self._skipped[self._columns] = False
        self._columns += 1
        self.seen += 1

    def add_loss(self, step: int, value: float) -> None:
        """The loss of a step, which also steps have of which nothing else is recorded."""
        if np.isfinite(value) and not (self._losses and self._losses[-1][0] >= step):
            self._losses.append((step, value))

    def note(self, fact: Fact) -> bool:
        """Keep a fact; says whether it is a new one."""
        if (fact.name, fact.site) in self._facts:
            return False
        self._facts[fact.name, fact.site] = fact
        return True

    # -- reading it ---------------------------------------------------------------------------------------

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """The steps that are kept, ascending."""
        return self._steps[: self._columns]

    @property
    def passes(self) -> npt.NDArray[np.int64]:
        """The passes of each of the kept steps."""
        return self._passes[: self._columns]

    @property
    def skipped(self) -> npt.NDArray[np.bool_]:
        """Whether a gradient scaler left a step's update out."""
        return self._skipped[: self._columns]

    def facts(self, name: str) -> list[Fact]:
        """The facts of one name, the earliest first."""
        return sorted(
            (fact for fact in self._facts.values() if fact.name == name), key=lambda fact: fact.step
        )

    def fact_names(self) -> set[str]:
        """The names of all facts that were told."""
        return {name for name, _ in self._facts}

    def places(self) -> list[ChartedSite]:
        """Every site that was recorded or expected, in execution order."""
        if self._places[0] != len(self._known):
            facts = self._facts_of_sites()
            names = dict.fromkeys((*(name for name in facts if name in self._known), *self._known, *facts))
            self._places = (len(self._known), described(names, facts))
            self._chosen.clear()
        return self._places[1]

    def has_come(self, site: str) -> bool:
        """Whether anything of a site was recorded."""
        return site in self._known

    def has(self, kind: str, statistic: str) -> bool:
        """Whether a statistic of any site of a kind was recorded."""
        table = self._tables.get(statistic)
        return table is not None and any(read_name(site).kind == kind for site in table.rows)

    def grid(
        self,
        statistic: str,
        *kinds: str,
        last: int | None = None,
        where: Callable[[ChartedSite], bool] | None = None,
    ) -> ChartGrid:
        """A statistic of the sites of some kinds, as far as they have it, in execution order."""
        table = self._tables.get(statistic)
        begin = 0 if last is None else max(0, self._columns - last)
        steps = self._steps[begin : self._columns]
        if table is None:
            return ChartGrid([], steps, np.zeros((0, len(steps))))
        chosen, rows = self._choose(table, statistic, kinds, where)
        return ChartGrid(chosen, steps, table.data[rows, begin : self._columns])

    def _choose(
        self,
        table: _Table,
        statistic: str,
        kinds: tuple[str, ...],
        where: Callable[[ChartedSite], bool] | None,
    ) -> tuple[list[ChartedSite], npt.NDArray[np.intp]]:
        places = self.places()
        key = (statistic, kinds, where, len(table.rows))
        known = self._chosen.get(key)
        if known is None:
            chosen = [
                place
                for place in places
                if place.kind in kinds and place.name in table.rows and (where is None or where(place))
            ]
            rows = np.array([table.rows[place.name] for place in chosen], np.intp)
            known = self._chosen[key] = (chosen, rows)
        return known

    def losses(self) -> tuple[npt.NDArray[np.int64], Numbers]:
        """Steps and losses of the last steps, recorded otherwise or not."""
        return (
            np.array([step for step, _ in self._losses], np.int64),
            np.array([value for _, value in self._losses], np.float64),
        )

    def series(self, site: str, statistic: str = "value") -> tuple[npt.NDArray[np.int64], Numbers]:
        """One number over the kept steps at which it was recorded."""
        table = self._tables.get(statistic)
        row = None if table is None else table.rows.get(site)
        if table is None or row is None:
            return np.zeros(0, np.int64), np.zeros(0)
        values = table.data[row, : self._columns]
        there = ~np.isnan(values)
        return self.steps[there], values[there]
