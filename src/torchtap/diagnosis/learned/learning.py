"""`learn`: good runs in, what held in all of them out.

Ranges belong to a site, a statistic, a phase and a stretch of the training. Their margin follows from the runs: each is
held against the others, and the most that one of them leaves the others' range by, over all sites like it, counts
three times with three runs and twice with many; half of the range's own width comes on top, and what chance does to the
size of a few elements. With one run alone there is no such measure, and sizes get a factor of two. No torch.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.learned.invariants import Bound, Invariants, SiteHabits
from torchtap.diagnosis.learned.numbers import (
    COUNTS,
    LOGGED,
    RANGED,
    SIZES,
    Grid,
    PhaseNumbers,
    as_ratio,
    numbers_of,
    window_of,
)
from torchtap.errors import DiagnosisError
from torchtap.plan.names import kind_of
from torchtap.store.read.lookup import TRAINING

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["learn"]

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
    """Whether the last third of a series is lower than the first."""
    values = values[~np.isnan(values)]
    third = len(values) // 3
    return bool(third and np.median(values[-third:]) < np.median(values[:third]))
