"""The chart of a training: what is recorded of it so far, as rules read it.

A chart is filled while a training runs, and from a finished run, by the same code. It guarantees:
- memory does not grow with the steps: the first `EARLY` columns and the last ones are kept;
- only passes that learn are in it: an evaluation beside a step leaves no number here;
- a number without a record is NaN; a grid without records is empty, never an error.

Beside numbers it holds facts (exact observations, one for each name and site) and the structure of the training. Both
are plain data, written to the run as events and read back. No torch. Not here: listening to a training (`doctor`),
judging (`rules`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from torchtap.placement import Placement
from torchtap.plan.names import kind_of, read_name, site_name
from torchtap.sanitize import shown
from torchtap.store.read.lookup import TRAINING

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = [
    "EARLY",
    "LOSS",
    "Block",
    "Chart",
    "ChartGrid",
    "ChartedSite",
    "Fact",
    "Structure",
    "fill",
    "places",
]


FACT, STRUCTURE, PULSE = "fact", "structure", "pulse"  # kinds of events
# Numbers that a doctor logs.
LOSS = ":value.loss"
SECONDS = ":value.seconds_before_backward"
TARGETS, WEIGHT = ":value.targets", ":value.weight_of_a_target"
# Facts of a rank: how its gradients and buffers are shared.
UNSYNCED, PAST_THE_WRAPPER, SCALED = "gradients-unsynced", "past-the-wrapper", "gradients-scaled"
BROADCAST = "buffers-broadcast"


@final
@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was seen at a site in a step: exact, and told once for each name and site."""

    name: str
    site: str
    step: int
    value: float = 0.0
    text: str = ""

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return asdict(self)


@final
@dataclass(frozen=True, slots=True)
class Structure:
    """How a training was set up, as its first update showed it."""

    trainable: frozenset[str] = frozenset()  # sites (kind param) that require a gradient
    frozen: frozenset[str] = frozenset()
    optimized: frozenset[str] = frozenset()  # sites (kind param) that an optimizer holds
    optimizers: tuple[str, ...] = ()  # their classes, with the module they come from
    fresh: bool = False  # whether the weights are as they were initialised
    sizes: Mapping[str, int] = field(default_factory=dict)  # elements of each parameter

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return {
            "trainable": sorted(self.trainable),
            "frozen": sorted(self.frozen),
            "optimized": sorted(self.optimized),
            "optimizers": list(self.optimizers),
            "fresh": self.fresh,
            "sizes": dict(self.sizes),
        }


def read_fact(event: Mapping[str, Any]) -> Fact | None:
    """The fact of an event that anybody may have written; None where it is none."""
    try:
        return Fact(
            str(event["name"]),
            str(event["site"]),
            int(event["step"]),
            float(event.get("value", 0.0)),
            shown(str(event.get("text", ""))),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def read_pulse(event: Mapping[str, Any]) -> dict[str, list[float]] | None:
    """Return the rows of an event, None if it has none. The event may be anybody's."""
    try:
        table = {str(name): [float(value) for value in column] for name, column in event["rows"].items()}
        rows = len(table["step"])
        whole = rows > 0 and all(len(column) == rows for column in table.values())
        return table if whole and all(math.isfinite(step) for step in table["step"]) else None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def read_structure(event: Mapping[str, Any]) -> Structure | None:
    """The structure of an event; None where it is none."""
    try:
        sizes = event.get("sizes", {})
        return Structure(
            frozenset(map(str, event["trainable"])),
            frozenset(map(str, event["frozen"])),
            frozenset(map(str, event["optimized"])),
            tuple(map(str, event.get("optimizers", ()))),
            bool(event.get("fresh", False)),
            {str(name): int(size) for name, size in sizes.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


@final
@dataclass(frozen=True, slots=True)
class ChartedSite:
    """One site."""

    name: str
    index: int  # in execution order
    module: str
    kind: str
    leaf: str
    call: int
    module_class: str
    source: str
    shape: tuple[int, ...] | None
    dtype: str


def described(names: Iterable[str], facts: Mapping[str, Mapping[str, Any]]) -> list[ChartedSite]:
    """The places of these sites, in this order. A leaf or a further call has what is known of its bare site."""
    found = []
    for index, name in enumerate(names):
        module, kind, leaf, call = read_name(name)
        known = {**facts.get(site_name(module, kind), {}), **facts.get(name, {})}
        found.append(
            ChartedSite(
                name,
                index,
                module,
                kind,
                leaf,
                call,
                str(known.get("class") or ""),
                str(known.get("source") or ""),
                _shape(known.get("shape")),
                str(known.get("dtype") or ""),
            )
        )
    return found


def places(run: Run) -> list[ChartedSite]:
    """Every site of a run in execution order."""
    return described(run.sites(), run.site_facts())


def _shape(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, (list, tuple)) or len(value) > 64 or not all(isinstance(n, int) for n in value):
        return None
    return tuple(value)


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
        self._pulse: Chart | None = None
        self.parameters: list[str] = []  # sites of the parameters, as the pulse numbers them

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

    def add_pulse(self, table: Mapping[str, Sequence[float]]) -> None:
        """Add rows of a training's pulse: one column of numbers for each name, ``step`` among them."""
        names = tuple(name for name in table if name != "step")
        values = np.array([table[name] for name in names], np.float64).reshape(len(names), -1)
        for column, step in enumerate(table["step"]):
            row = values[:, column]
            self.pulse.add(int(step), [(names, ("value",), row[:, None], ~np.isnan(row))])
            for name, value in zip(names, row.tolist(), strict=True):
                if name.endswith(".loss"):
                    self.add_loss(int(step), value)

    @property
    def pulse(self) -> Chart:
        """The pulse as a chart of its own: ``chart.pulse.series("0.0.lr")``."""
        if self._pulse is None:
            self._pulse = Chart(dict)
        return self._pulse

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

    def names(self) -> list[str]:
        """Return the names of every site that was recorded."""
        return list(self._known)

    def has_come(self, site: str) -> bool:
        """Return True if anything of a site was recorded."""
        return site in self._known

    def has(self, kind: str, statistic: str) -> bool:
        """Return True if a statistic of any site of a kind was recorded."""
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

    def row(self, site: str, statistic: str = "value") -> Numbers | None:
        """Return a number at every kept step, NaN where it was not recorded; None if it never was."""
        table = self._tables.get(statistic)
        row = None if table is None else table.rows.get(site)
        return None if table is None or row is None else table.data[row, : self._columns]

    def series(self, site: str, statistic: str = "value") -> tuple[npt.NDArray[np.int64], Numbers]:
        """One number over the kept steps at which it was recorded."""
        values = self.row(site, statistic)
        if values is None:
            return np.zeros(0, np.int64), np.zeros(0)
        there = ~np.isnan(values)
        return self.steps[there], values[there]


PORTION = 8  # columns between two looks
_PULSE_PORTION = 4  # tables of the pulse between two looks
_MOST = 2400  # of a longer run, this many steps are looked at: the first ones, and others evenly spread
_FIRST = 400
LEARNED = frozenset(("param_grad", "update"))  # kinds that only a phase that learns has


def chart_of(run: Run) -> Chart:
    """An empty chart for a run."""
    return Chart(run.site_facts)


def fill(chart: Chart, run: Run, only: frozenset[str] | None = None) -> Iterator[None]:
    """Put the run into the chart, a few columns at a time; what was told by a step is there with it.

    ``only`` are the statistics that are wanted.
    """
    structures = [found for event in run.events(STRUCTURE) if (found := read_structure(event)) is not None]
    if structures:
        chart.structure = structures[-1]
    passes, skipped = _by_step(run.clock())
    recorded = np.asarray(run.steps(), np.int64)
    steps = chosen(np.array([step for step in recorded.tolist() if passes.get(step)], np.int64))
    told = _Told(run)
    chart.parameters = told.parameters
    tables = _tables(run, steps, only)
    for begin in range(0, len(steps), PORTION):
        for column in range(begin, min(begin + PORTION, len(steps))):
            step = int(steps[column])
            blocks = [_block(sites, statistic, values[:, column]) for sites, statistic, values in tables]
            chart.add(step, blocks, passes=passes.get(step, 1), skipped=skipped.get(step, False))
            told.put_into(chart, step)
        yield
    yield from told.rest(chart)
    told.put_into(chart, math.inf)
    yield


@final
class _Told:
    """Losses and facts of a run that are still to come, in the order of their steps."""

    def __init__(self, run: Run) -> None:
        facts = [fact for event in run.events(FACT) if (fact := read_fact(event)) is not None]
        self._facts = deque(sorted(facts, key=lambda fact: fact.step))
        self._losses = deque(_losses(run))
        self._pulse: deque[dict[str, list[float]]] = deque()
        self.parameters: list[str] = []
        for event in run.events(PULSE):
            table = read_pulse(event)
            if table is not None:
                self._pulse.append(table)
            names = event.get("parameters")
            if isinstance(names, list):
                self.parameters = [str(name) for name in names]

    def put_into(self, chart: Chart, last: float) -> None:
        """What was told up to and with a step."""
        while self._losses and self._losses[0][0] <= last:
            chart.add_loss(*self._losses.popleft())
        while self._facts and self._facts[0].step <= last:
            chart.note(self._facts.popleft())
        while self._pulse and self._pulse[0]["step"][-1] <= last:
            chart.add_pulse(self._pulse.popleft())

    def rest(self, chart: Chart) -> Iterator[None]:
        """Add the rows of the pulse that are left, with a pause after each few, so that all of them are judged."""
        while self._pulse:
            for _ in range(min(_PULSE_PORTION, len(self._pulse))):
                chart.add_pulse(self._pulse.popleft())
            yield


def _losses(run: Run) -> list[tuple[int, float]]:
    """The losses of all steps."""
    if LOSS not in run.sites():
        return []
    found = run.series(LOSS, "value", partial=True)
    return list(zip(found.steps.tolist(), found.values.tolist(), strict=True))


def _block(sites: tuple[str, ...], statistic: tuple[str], values: np.ndarray) -> Block:
    return sites, statistic, values[:, None], ~np.isnan(values)


def _tables(
    run: Run, steps: npt.NDArray[np.int64], only: frozenset[str] | None
) -> list[tuple[tuple[str, ...], tuple[str], np.ndarray]]:
    """Each statistic of all sites, from the phases that learn; training comes last and counts."""
    found = []
    statistics_of = {site: run.statistics(site) for site in run.sites()}
    phases = {phase: _learning(run, phase, steps, statistics_of) for phase in run.phases}
    in_order = sorted(phases.items(), key=lambda item: item[0] == TRAINING)
    for statistic in run.statistics():
        if only is not None and statistic not in only:
            continue
        sites = [site for site, has in statistics_of.items() if statistic in has]
        for phase, learns in in_order:
            if learns.any():
                names, _, values = run.matrix(statistic, sites=sites, steps=steps, phase=phase, partial=True)
                kept = np.where(learns, np.asarray(values), np.nan)
                found.append((tuple(names), (statistic,), kept))
    return found


def _learning(
    run: Run, phase: str, steps: npt.NDArray[np.int64], statistics_of: dict[str, list[str]]
) -> npt.NDArray[np.bool_]:
    """The steps at which a phase learned."""
    if phase == TRAINING:
        return np.ones(len(steps), np.bool_)
    learns = np.zeros(len(steps), np.bool_)
    for site, statistics in statistics_of.items():
        if kind_of(site) in LEARNED:
            seen = run.series(site, statistics[0], phase, partial=True).steps
            learns |= np.isin(steps, seen)
            if learns.any():
                break
    return learns


def chosen(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The steps of a run that are looked at: all, or of a very long run the first ones and others evenly spread."""
    if len(steps) <= _MOST:
        return steps
    spread = np.linspace(_FIRST, len(steps) - 1, _MOST - _FIRST).round().astype(np.int64)
    return np.asarray(steps[np.unique(np.r_[np.arange(_FIRST), spread])], np.int64)


def _by_step(clock: Any) -> tuple[dict[int, int], dict[int, bool]]:
    passes: dict[int, int] = {}
    skipped: dict[int, bool] = {}
    for step, phase, count, left_out in zip(
        clock.step.tolist(), clock.phase.tolist(), clock.passes.tolist(), clock.skipped.tolist(), strict=True
    ):
        passes[step] = (
            max(int(count), passes.get(step, 0)) if phase == TRAINING else passes.get(step) or int(count)
        )
        skipped[step] = skipped.get(step, False) or bool(left_out)
    return passes, skipped
