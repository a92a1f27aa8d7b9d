"""What of the invariants no longer holds in a run, as findings: one for each sort of invariant.

A range, a count or a coming is broken when three records in a row break it (all, where a site has fewer); the finding
names the first of them. It begins where the earliest step has it, and there at parameters before values and values
before gradients, since that is the way a fault goes. Steps after the last one that every good run had are not judged.
No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.finding import Evidence, Finding, Findings, Severity, Unjudged
from torchtap.diagnosis.learned.invariants import Bound, Invariants, SiteHabits
from torchtap.diagnosis.learned.learning import falls
from torchtap.diagnosis.learned.numbers import LOGGED, SIZES, Flags, Grid, PhaseNumbers, numbers_of, on_scale
from torchtap.diagnosis.rules.windows import first_run
from torchtap.plan.names import kind_of
from torchtap.sanitize import shown
from torchtap.store.read.lookup import TRAINING

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["what_no_longer_holds"]

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
