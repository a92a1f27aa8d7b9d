"""Invariants of good runs: `learn` them, write them to a file, report which no longer hold in another run.

Ranges belong to a site, a statistic, a phase and a stretch of the training. Their margin follows from the runs: each
run is compared with the others, and the largest distance outside their range, over all similar sites, counts three
times with three runs and twice with many. Half of the range's width is added, and the chance error of the size of a
few elements. With a single run there is no such measure, and sizes get a factor of two.

A range, a count or a site's presence is broken when three records in a row break it (all, if a site has fewer). The
finding names the first. Steps after the last one that every good run had are not judged.

The file is JSON that people can read and edit. It may be anybody's: its size is bounded and each part is checked
before use. Anything wrong with it is a `DiagnosisError`. No torch.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import SECONDS, chosen
from torchtap.diagnosis.finding import Evidence, Finding, Findings, Severity, Unjudged
from torchtap.diagnosis.rule_type import Flags, first_run
from torchtap.errors import DiagnosisError, OutputError
from torchtap.plan.names import kind_of
from torchtap.sanitize import open_file, parse_json, shown
from torchtap.store.read.lookup import TRAINING

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["Bound", "Invariants", "SiteHabits", "learn", "read_invariants", "what_no_longer_holds"]


VERSION = 1
_LARGEST = 256 * 2**20
_NAME = "torchtap_invariants"


@final
@dataclass(frozen=True, slots=True)
class Bound:
    """A range from one step to another, both included; the margin is in it. None is no limit."""

    first: int
    last: int
    low: float | None
    high: float | None


@final
@dataclass(slots=True)
class SiteHabits:
    """What held at one site in one phase."""

    always: bool = False  # it came whenever others of its kind did
    moves: bool | None = None  # a parameter that changed from record to record, or never; None: sometimes
    ranges: dict[str, list[Bound]] = field(default_factory=dict)
    constant: dict[str, float] = field(default_factory=dict)


@final
@dataclass(slots=True)
class Invariants:
    """What held in all of some good runs."""

    runs: list[str]
    phases: dict[str, dict[str, SiteHabits]]
    equal: list[list[str]]  # sites of training that always had the same numbers
    falls: list[str]  # logged numbers that ended lower than they began
    last_step: int

    def write(self, path: str | os.PathLike[str]) -> None:
        """Keep them in a file."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"the invariants cannot be written to {os.fspath(path)}: {error}") from error

    def to_dict(self) -> dict[str, object]:
        """As plain data, for JSON."""
        phases = {
            phase: {site: _plain(habits) for site, habits in sites.items()}
            for phase, sites in self.phases.items()
        }
        return {
            _NAME: VERSION,
            "runs": self.runs,
            "last_step": self.last_step,
            "equal": self.equal,
            "falls": self.falls,
            "phases": phases,
        }


def _plain(habits: SiteHabits) -> dict[str, object]:
    ranges = {
        statistic: [[each.first, each.last, each.low, each.high] for each in bounds]
        for statistic, bounds in habits.ranges.items()
    }
    return {"always": habits.always, "moves": habits.moves, "constant": habits.constant, "ranges": ranges}


def read_invariants(path: str | os.PathLike[str]) -> Invariants:
    """The invariants of a file that `torchtap learn` wrote."""
    place = os.fspath(path)
    try:
        with open_file(place) as opened:
            raw = opened.read(_LARGEST + 1)
    except (OSError, ValueError) as error:
        raise DiagnosisError(f"the invariants at {place} cannot be read: {error}") from error
    if len(raw) > _LARGEST:
        raise DiagnosisError(
            f"{place} has more than {_LARGEST} bytes: it is no file that `torchtap learn` wrote"
        )
    try:
        return _invariants(parse_json(raw, strict=True))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DiagnosisError(
            f"{place} is not a file of invariants, or damaged ({type(error).__name__}: {error}); "
            "`torchtap learn GOOD_RUN... -o FILE` writes one"
        ) from error


def _invariants(read: Any) -> Invariants:
    version = _mapping(read).get(_NAME)
    if version != VERSION:
        raise ValueError(f"its {_NAME!r} is {version!r}, and this torchtap reads {VERSION}")
    return Invariants(
        _texts(read["runs"]),
        {
            phase: {site: _habits(_mapping(each)) for site, each in _mapping(sites).items()}
            for phase, sites in _mapping(read["phases"]).items()
        },
        [_texts(group) for group in _list(read["equal"])],
        _texts(read["falls"]),
        _whole(read["last_step"]),
    )


def _habits(read: Mapping[str, object]) -> SiteHabits:
    moves = read["moves"]
    if not isinstance(read["always"], bool) or not (moves is None or isinstance(moves, bool)):
        raise ValueError("'always' and 'moves' are true or false")
    ranges = {
        statistic: [_bound(each) for each in _list(bounds)]
        for statistic, bounds in _mapping(read["ranges"]).items()
    }
    constant = {statistic: _number(value) for statistic, value in _mapping(read["constant"]).items()}
    return SiteHabits(read["always"], moves, ranges, constant)


def _bound(read: object) -> Bound:
    first, last, low, high = _list(read)
    return Bound(_whole(first), _whole(last), _or_none(_number, low), _or_none(_number, high))


def _or_none(check: Callable[[object], float], value: object) -> float | None:
    return None if value is None else check(value)


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a table was expected, not {type(value).__name__}")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a list was expected, not {type(value).__name__}")
    return value


def _texts(value: Any) -> list[str]:
    if not all(isinstance(each, str) for each in _list(value)):
        raise ValueError("a list of names was expected")
    return list(value)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise ValueError("a step is a whole number")
    return value


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("a limit is a finite number")
    return float(value)


SIZES = ("rms", "std", "absmax")  # never negative, and compared by their ratio
LOGGED = "value"
RANGED = (*SIZES, LOGGED)
COUNTS = ("count", "nans", "infs")  # compared exactly

Grid = npt.NDArray[np.float64]


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


_LEAST = math.log(1.05)  # of a margin; for logged numbers, the share of their size
_LEAST_OF_ONE = math.log(2.0)
_MORE = (32, 1024)  # elements: with fewer, statistics vary more from run to run
_CHANCE = 4.0  # standard errors of a size, which is one over the root of twice the number of elements
_TIED = frozenset(("param", "param_grad", "update"))
Key = tuple[str, str, int]  # site, statistic, window


def learn(runs: Sequence[Run | str | os.PathLike[str]]) -> Invariants:
    """What held in all of these runs, which went well: the same training with other seeds, best three or more.

    ``write(path)`` of the answer keeps it; `diagnose` takes it, or the file, as ``against``.
    """
    from torchtap.store.read.reader import open_run

    opened = [open_run(run, partial=True) if isinstance(run, (str, os.PathLike)) else run for run in runs]
    if not opened:
        raise DiagnosisError("there is nothing to learn from: name at least one run that went well")
    numbers = [numbers_of(run) for run in opened]
    by_phase = _by_phase(numbers)
    phases = {phase: _phase(found) for phase, found in by_phase.items()}
    if not any(phases.values()):
        raise DiagnosisError(
            "these runs have no statistics of the same sites: record them with the same plan, with tt.Stats()"
        )
    training = by_phase.get(TRAINING)
    return Invariants(
        [str(run.path) for run in opened],
        phases,
        _equal(training) if training else [],
        _falling(training) if training else [],
        min(map(_last_step, numbers)),
    )


def _by_phase(numbers: list[dict[str, PhaseNumbers]]) -> dict[str, list[PhaseNumbers]]:
    """The numbers of all runs by phase; those phases that each of them has."""
    common = [phase for phase in numbers[0] if all(phase in each for each in numbers)]
    return {phase: [each[phase] for each in numbers] for phase in common}


def _last_step(phases: Mapping[str, PhaseNumbers]) -> int:
    return int(max((each.steps.max() for each in phases.values() if len(each.steps)), default=0))


def _phase(numbers: list[PhaseNumbers]) -> dict[str, SiteHabits]:
    common = _common_sites(numbers)
    habits = {site: SiteHabits() for site in common}
    for site, ranges in _ranges(common, numbers).items():
        habits[site].ranges = ranges
    missed = [each.missed() for each in numbers]
    rows = [each.rows() for each in numbers]
    for site, own in habits.items():
        places = [row[site] for row in rows]
        own.always = not any(grid[place].any() for grid, place in zip(missed, places, strict=True))
        own.constant = _constants(numbers, places)
        if kind_of(site) == "param":
            own.moves = _moves(numbers, places)
    return habits


def _row(numbers: PhaseNumbers, statistic: str, row: int) -> Grid:
    grid = numbers.grids.get(statistic)
    return np.full(len(numbers.steps), np.nan) if grid is None else grid[row]


def _constants(numbers: list[PhaseNumbers], places: list[int]) -> dict[str, float]:
    found = {}
    for statistic in COUNTS:
        values = np.concatenate([_row(n, statistic, row) for n, row in zip(numbers, places, strict=True)])
        values = values[~np.isnan(values)]
        if len(values) and np.isfinite(values[0]) and (values == values[0]).all():
            found[statistic] = float(values[0])
    return found


def _moves(numbers: list[PhaseNumbers], places: list[int]) -> bool | None:
    changes = []
    for each, row in zip(numbers, places, strict=True):
        values = _row(each, "rms", row)
        changes.append(np.diff(values[~np.isnan(values)]) != 0)
    if min(map(len, changes)) < 2:
        return None
    together = np.concatenate(changes)
    return True if together.all() else None if together.any() else False


def _ranges(sites: list[str], numbers: list[PhaseNumbers]) -> dict[str, dict[str, list[Bound]]]:
    ratios = _compared_by_ratio(sites, numbers)
    extremes = _extremes(sites, numbers, ratios)
    elements = _elements(sites, numbers)
    margins = _margins(extremes, elements)
    steps = np.concatenate([each.steps for each in numbers])
    windows = window_of(steps)
    found: dict[str, dict[str, list[Bound]]] = {}
    for (site, statistic, window), ends in extremes.items():
        stretch = steps[windows == window]
        by_ratio = (site, statistic) in ratios
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        # What one run in few leaves the others by says less of the next run than what one in many does.
        spread = margins[_like(site, elements), statistic, window] * (2 + 2 / max(1, len(ends) - 1))
        margin = spread + _own_margin(by_ratio, low, high, len(ends))
        if statistic in SIZES:
            margin += _CHANCE / math.sqrt(2 * max(1.0, elements.get(site, math.inf) - 1))
        bound = Bound(
            int(stretch.min()),
            int(stretch.max()),
            _off_scale(by_ratio, low - margin),
            _off_scale(by_ratio, high + margin),
        )
        found.setdefault(site, {}).setdefault(statistic, []).append(bound)
    return found


def _like(site: str, elements: dict[str, float]) -> tuple[str, int]:
    """Sites that vary alike from run to run: those of one kind, with few, some or many elements."""
    count = elements.get(site, 0.0)
    return kind_of(site), sum(count >= limit for limit in _MORE)


def _margins(
    extremes: dict[Key, list[tuple[float, float]]], elements: dict[str, float]
) -> dict[tuple[tuple[str, int], str, int], float]:
    """The most that one run leaves the others by: of sites alike, of a statistic, in a stretch and those beside it."""
    left: defaultdict[tuple[tuple[str, int], str, int], float] = defaultdict(float)
    for (site, statistic, window), ends in extremes.items():
        group = (_like(site, elements), statistic, window)
        left[group] = max(left[group], _most_left_out(ends))
    return {
        (like, statistic, window): max(
            left.get((like, statistic, at), 0.0) for at in (window - 1, window, window + 1)
        )
        for like, statistic, window in left
    }


def _compared_by_ratio(sites: list[str], numbers: list[PhaseNumbers]) -> set[tuple[str, str]]:
    """Sizes, and logged numbers that are always positive, as most losses are."""
    found = {(site, statistic) for site in sites for statistic in SIZES}
    for site in sites:
        logged = np.concatenate([_row(each, LOGGED, each.rows()[site]) for each in numbers])
        if (logged[~np.isnan(logged)] > 0).all():
            found.add((site, LOGGED))
    return found


def _elements(sites: list[str], numbers: list[PhaseNumbers]) -> dict[str, float]:
    """The least number of elements that a site's statistics were of: those of few elements vary by chance."""
    found = {}
    for site in sites:
        counts = np.concatenate([_row(each, "count", each.rows()[site]) for each in numbers])
        counts = counts[~np.isnan(counts)]
        if len(counts):
            found[site] = float(counts.min())
    return found


def _extremes(
    sites: list[str], numbers: list[PhaseNumbers], ratios: set[tuple[str, str]]
) -> dict[Key, list[tuple[float, float]]]:
    """The smallest and the largest value of each run, where every run has one."""
    found: defaultdict[Key, list[tuple[float, float]]] = defaultdict(list)
    for each in numbers:
        windows, rows = window_of(each.steps), each.rows()
        for statistic in (name for name in RANGED if name in each.grids):
            for window in np.unique(windows).tolist():
                part = each.grids[statistic][:, windows == window]
                for site in sites:
                    values = part[rows[site]]
                    values = values[~np.isnan(values)]
                    if len(values):
                        ends = np.array([values.min(), values.max()])
                        low, high = as_ratio(ends) if (site, statistic) in ratios else ends
                        found[site, statistic, window].append((float(low), float(high)))
    return {key: ends for key, ends in found.items() if len(ends) == len(numbers)}


def _most_left_out(ends: list[tuple[float, float]]) -> float:
    """The most by which one run leaves the range of the others."""
    most = 0.0
    for own, (low, high) in enumerate(ends):
        others = [each for other, each in enumerate(ends) if other != own]
        if others:
            beyond = (min(each[0] for each in others) - low, high - max(each[1] for each in others))
            most = max(most, *(each for each in beyond if math.isfinite(each)), 0.0)
    return most


def _own_margin(by_ratio: bool, low: float, high: float, runs: int) -> float:
    width = high - low if math.isfinite(high - low) else 0.0
    least = _LEAST if runs > 1 else _LEAST_OF_ONE
    if not by_ratio:
        least *= max(abs(low), abs(high)) if math.isfinite(low) and math.isfinite(high) else 0.0
    return width / 2 + least


def _off_scale(by_ratio: bool, value: float) -> float | None:
    """A limit as it stands in the file. A size of zero is no lower limit."""
    if by_ratio:
        value = math.exp(value) if value < 700 else math.inf
    return value if math.isfinite(value) else None


def _equal(numbers: list[PhaseNumbers]) -> list[list[str]]:
    """Groups of parameters, or of their gradients, that had the same numbers in each record of each run."""
    groups: defaultdict[tuple[bytes, ...], list[str]] = defaultdict(list)
    for site in _common_sites(numbers):
        if kind_of(site) not in _TIED:
            continue
        found = [values for each in numbers for values in _sizes(each, site)]
        if any(_varies(values) for values in found):
            groups[(kind_of(site).encode(), *(values.tobytes() for values in found))].append(site)
    return [group for group in groups.values() if len(group) > 1]


def _common_sites(numbers: list[PhaseNumbers]) -> list[str]:
    rows = [each.rows() for each in numbers]
    return [site for site in numbers[0].sites if all(site in own for own in rows)]


def _sizes(numbers: PhaseNumbers, site: str) -> list[Grid]:
    row = numbers.rows()[site]
    return [numbers.grids[statistic][row] for statistic in SIZES if statistic in numbers.grids]


def _varies(values: npt.NDArray[np.float64]) -> bool:
    return len(np.unique(values[~np.isnan(values)])) > 2


def _falling(numbers: list[PhaseNumbers]) -> list[str]:
    """Logged numbers whose last third was lower than their first, in each run."""
    rows = [each.rows() for each in numbers]
    return [
        site
        for site in numbers[0].sites
        if all(
            site in own and falls(_row(each, LOGGED, own[site]))
            for each, own in zip(numbers, rows, strict=True)
        )
    ]


def falls(values: Grid) -> bool:
    """Return True if the last third of a series is lower than the first."""
    values = values[~np.isnan(values)]
    third = len(values) // 3
    return bool(third and np.median(values[-third:]) < np.median(values[:third]))


_IN_A_ROW = 3
# What a fault reaches first; other kinds come between values and gradients.
_WAY = {"param": 0, "buffer": 1, "lr": 2, "input": 3, "output": 4, "value": 5}
_LAST = {"grad_output": 7, "grad_input": 8, "param_grad": 9, "optim_state": 10, "update": 11}
_NEW_SITES = "learned-new-site"


@final
@dataclass(frozen=True, slots=True)
class _Broken:
    """One invariant that did not hold."""

    site: str
    step: int
    says: str  # how it no longer holds, after the site's name
    statistic: str = ""
    value: float = 0.0
    limit: float | None = None
    distance: float = 0.0  # beyond the limit, on the statistic's scale

    @property
    def rank(self) -> tuple[int, int, float]:
        kind = kind_of(self.site)
        return self.step, _WAY.get(kind, _LAST.get(kind, 6)), -self.distance


def what_no_longer_holds(invariants: Invariants, run: Run) -> Findings:
    """The findings on a run, and what could not be judged since the run does not have it."""
    numbers = numbers_of(run)
    broken: dict[str, list[_Broken]] = {}
    unjudged = []
    for phase, sites in invariants.phases.items():
        if phase not in numbers:
            unjudged.append(Unjudged("learned", f"the run has no phase {shown(phase)!r}"))
            continue
        seen = _up_to(numbers[phase], invariants.last_step)
        kinds = {kind_of(site) for site in seen.sites}
        if not kinds.isdisjoint(map(kind_of, sites)):
            absent = sorted({kind_of(site) for site in sites} - kinds)
            unjudged += [
                Unjudged("learned", f"record *:{shown(kind)}, as the good runs did") for kind in absent
            ]
        for sort, each in _of_phase(sites, seen, kinds):
            broken.setdefault(sort, []).append(each)
    if TRAINING in numbers:
        training = numbers[TRAINING]
        broken["learned-equal"] = list(_parted(invariants.equal, training))
        broken["learned-order"] = list(_not_falling(invariants, training))
    return Findings([_finding(sort, each) for sort, each in broken.items() if each], unjudged)


def _up_to(numbers: PhaseNumbers, last: int) -> PhaseNumbers:
    judged = numbers.steps <= last
    return PhaseNumbers(
        numbers.sites, numbers.steps[judged], {name: grid[:, judged] for name, grid in numbers.grids.items()}
    )


def _of_phase(
    sites: dict[str, SiteHabits], seen: PhaseNumbers, kinds: set[str]
) -> Iterator[tuple[str, _Broken]]:
    rows, missed, came = seen.rows(), seen.missed(), seen.came()
    for site, habits in sites.items():
        if site in rows:
            row = rows[site]
            yield from _of_site(site, habits, seen, row, missed[row], came[row])
        elif habits.always and kind_of(site) in kinds and len(seen.steps):
            yield "learned-missing", _Broken(site, int(seen.steps[0]), "does not come at all")
    yield from ((_NEW_SITES, each) for each in _new_sites(sites, seen))


def _new_sites(sites: Collection[str], seen: PhaseNumbers) -> Iterator[_Broken]:
    """Sites that no good run had, of kinds that they had."""
    rows, came = seen.rows(), seen.came()
    known = {kind_of(site) for site in sites}
    for site in seen.sites:
        columns = np.flatnonzero(came[rows[site]])
        if site not in sites and kind_of(site) in known and len(columns):
            yield _Broken(site, int(seen.steps[columns[0]]), "was not in the good runs")


def _of_site(
    site: str, habits: SiteHabits, seen: PhaseNumbers, row: int, missed: Flags, came: Flags
) -> Iterator[tuple[str, _Broken]]:
    """What a site that is there does otherwise than in the good runs."""
    due = np.flatnonzero(missed | came)
    if habits.always and (at := first_run(missed[due], _IN_A_ROW)) is not None:
        begins = due[at - _IN_A_ROW + 1]
        yield "learned-missing", _Broken(site, int(seen.steps[begins]), "no longer comes")
    columns = np.flatnonzero(came)
    values = {name: grid[row, columns] for name, grid in seen.grids.items()}
    own = _Series(site, seen.steps[columns], values)
    yield from (("learned-range", each) for each in own.out_of_range(habits.ranges))
    yield from (("learned-constant", each) for each in own.not_constant(habits.constant))
    yield from (("learned-moves", each) for each in own.moves_otherwise(habits.moves))


@final
@dataclass(frozen=True)
class _Series:
    """The records of one site."""

    site: str
    steps: npt.NDArray[np.int64]
    values: dict[str, Grid]

    def _first(self, wrong: npt.NDArray[np.bool_]) -> int | None:
        """The record with which enough wrong ones in a row begin."""
        enough = min(_IN_A_ROW, len(wrong))
        at = first_run(wrong, enough) if enough else None
        return None if at is None else at - enough + 1

    def out_of_range(self, ranges: dict[str, list[Bound]]) -> Iterator[_Broken]:
        for statistic, bounds in ranges.items():
            if statistic not in self.values:
                continue
            values = self.values[statistic]
            low, high = _limits(self.steps, bounds)
            at = self._first((values < low) | (values > high))
            if at is not None:
                value, limit = float(values[at]), float(low[at] if values[at] < low[at] else high[at])
                ends = on_scale(statistic, [value, limit])
                way = "below" if value < limit else "above"
                yield _Broken(self.site, int(self.steps[at]),
                              f"has {statistic} {value:.4g}, {way} the {limit:.4g} of good runs",
                              statistic, value, limit, float(abs(ends[0] - ends[1])))  # fmt: skip

    def not_constant(self, constant: dict[str, float]) -> Iterator[_Broken]:
        for statistic, wanted in constant.items():
            values = self.values.get(statistic, np.empty(0))
            at = self._first(~np.isnan(values) & (values != wanted))
            if at is not None:
                value = float(values[at])
                yield _Broken(self.site, int(self.steps[at]),
                              f"has {statistic} {value:.6g}, which was always {wanted:.6g}",
                              statistic, value, wanted)  # fmt: skip

    def moves_otherwise(self, moves: bool | None) -> Iterator[_Broken]:
        if moves is None or "rms" not in self.values:
            return
        values = self.values["rms"]
        changed = np.diff(values) != 0
        if moves:
            at = first_run(~changed, _IN_A_ROW - 1)
            begins = None if at is None else at - (_IN_A_ROW - 1) + 1
            says = "no longer changes, as it did in good runs"
        else:
            begins = int(np.argmax(changed)) if changed.any() else None
            says = "changes, which it never did in good runs"
        if begins is not None:
            yield _Broken(self.site, int(self.steps[begins + 1]), says, "rms", float(values[begins + 1]))


def _limits(steps: npt.NDArray[np.int64], bounds: list[Bound]) -> tuple[Grid, Grid]:
    """The limits of each step; none between stretches that were learned."""
    low, high = np.full(len(steps), -np.inf), np.full(len(steps), np.inf)
    for bound in bounds:
        inside = (steps >= bound.first) & (steps <= bound.last)
        if bound.low is not None:
            low[inside] = bound.low
        if bound.high is not None:
            high[inside] = bound.high
    return low, high


def _parted(groups: Iterable[list[str]], numbers: PhaseNumbers) -> Iterator[_Broken]:
    rows = numbers.rows()
    for group in groups:
        here = [site for site in group if site in rows]
        for site in here[1:]:
            for statistic in (name for name in SIZES if name in numbers.grids):
                one, other = (numbers.grids[statistic][rows[name]] for name in (here[0], site))
                apart = ~np.isnan(one) & ~np.isnan(other) & (one != other)
                if apart.any():
                    at = int(np.argmax(apart))
                    yield _Broken(site, int(numbers.steps[at]), f"is no longer equal to {shown(here[0])}",
                                  statistic, float(other[at]), float(one[at]))  # fmt: skip
                    break


def _not_falling(invariants: Invariants, numbers: PhaseNumbers) -> Iterator[_Broken]:
    rows = numbers.rows()
    if LOGGED not in numbers.grids or not len(numbers.steps) or numbers.steps[-1] < invariants.last_step:
        return  # a training that has not come as far may still fall
    for site in invariants.falls:
        if site in rows:
            values = numbers.grids[LOGGED][rows[site]]
            recorded = np.flatnonzero(~np.isnan(values))
            if len(recorded) > _IN_A_ROW and not falls(values):
                at = recorded[-1]
                yield _Broken(site, int(numbers.steps[at]), "does not fall, as it did in good runs",
                              LOGGED, float(values[at]), float(values[recorded[0]]))  # fmt: skip


_ADVICE = {
    "learned-range": "compare the initialisation, the data and the learning rate with those of the good runs",
    "learned-constant": "compare the shapes and the data with those of the good runs",
    "learned-moves": "check requires_grad and what the optimizer holds: param.requires_grad_(True)",
    "learned-missing": "check that the module is called and that its parameters require a gradient",
    "learned-equal": "tie the weights again: a.weight = b.weight",
    "learned-order": "compare the data, the labels and the learning rate with those of the good runs",
    _NEW_SITES: "learn again if the model was changed on purpose: torchtap learn GOOD_RUN... -o FILE",
}


def _finding(sort: str, broken: list[_Broken]) -> Finding:
    """One finding for all that broke in the same way, at the place where it begins."""
    ordered = sorted(broken, key=lambda each: each.rank)
    first = ordered[0]
    sites = tuple(dict.fromkeys(each.site for each in ordered))
    also = f" (and {len(sites) - 1} more sites)" if len(sites) > 1 else ""
    evidence = [
        Evidence(f"{each.statistic} of {shown(each.site)}", each.value, each.site, each.statistic, each.step)
        for each in ordered[:4]
        if each.statistic
    ]
    if first.limit is not None:
        evidence.append(Evidence("the limit that good runs kept to", first.limit))
    severity: Severity = "info" if sort == _NEW_SITES else "warning"
    return Finding(
        sort,
        severity,
        first.site,
        first.step,
        first.value if first.statistic else None,
        f"{shown(first.site)}{also} {first.says}, from step {first.step}",
        _ADVICE[sort],
        sites,
        ("something of the training was changed since the good runs",),
        tuple(evidence),
        "history",
    )
