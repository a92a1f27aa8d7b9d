"""Ranks against each other: replicas that drift apart, that began apart, that are fed the same, that disagree.

Judged on a finished run that several ranks wrote. What is replicated is told by the numbers: a parameter that has the
same statistics on every rank at the first step is the same parameter. Shards of one have other numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.finding import Evidence, Finding, Severity, Trust
from torchtap.diagnosis.places import Place
from torchtap.diagnosis.rules.base import Hit, Need, Rule
from torchtap.diagnosis.rules.data import is_model_input
from torchtap.diagnosis.rules.windows import first_run

__all__ = ["RanksApart", "RanksDisagree", "RanksDrift", "RanksFedAlike"]

_PRINT = ("mean", "l1", "l2", "absmax")
Same = npt.NDArray[np.bool_]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """Of some sites, at each common step, whether all ranks have the same numbers; ``seen`` where all have any."""

    places: list[Place]
    steps: npt.NDArray[np.int64]
    same: Same
    seen: Same
    alone: npt.NDArray[
        np.int64
    ]  # the rank that differs from all others, which agree; -1 where there is no such


def agreement(chart: Chart, kind: str) -> Agreement | None:
    """How the ranks agree on the sites of a kind; None where they have no step or no site in common."""
    charts = list(chart.ranks.values())
    steps = charts[0].steps
    for other in charts[1:]:
        steps = np.intersect1d(steps, other.steps)
    names = [{place.name for place in each.grid("l2", kind).places} for each in charts]
    places = [
        place for place in charts[0].grid("l2", kind).places if all(place.name in each for each in names)
    ]
    if not len(steps) or not places:
        return None
    prints = np.stack([_prints(each, kind, [place.name for place in places], steps) for each in charts])
    seen = np.asarray(np.isfinite(prints).all(axis=(0, 1)), np.bool_)
    same = np.asarray((prints == prints[:1]).all(axis=(0, 1)), np.bool_)
    return Agreement(places, steps, same, seen, _alone(list(chart.ranks), prints))


def _alone(ranks: list[int], prints: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """At each site and step the one rank unlike the rest; of two that differ nobody can say which is right."""
    found = np.full(prints.shape[2:], -1, np.int64)
    if len(ranks) < 3:
        return found
    for index, rank in enumerate(ranks):
        rest = np.delete(prints, index, axis=0)
        agree = (rest == rest[:1]).all(axis=(0, 1))
        found[agree & (prints[index] != rest[0]).any(axis=0)] = rank
    return found


def _prints(
    chart: Chart, kind: str, names: list[str], steps: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Statistics of sites at steps: (statistic, site, step)."""
    found = []
    for statistic in _PRINT:
        grid = chart.grid(statistic, kind)
        row = {place.name: index for index, place in enumerate(grid.places)}
        columns = np.searchsorted(grid.steps, steps)
        found.append(grid.values[[row[name] for name in names]][:, columns])
    return np.stack(found)


class _RankRule(Rule):
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need("param", "l2"),)

    def judge(self, chart: Chart) -> Iterable[Finding]:
        if len(chart.ranks) > 1:
            yield from self.compare(chart)

    @abstractmethod
    def compare(self, chart: Chart) -> Iterable[Finding]:
        """What is wrong between the ranks."""

    def say(
        self, chart: Chart, hits: list[Hit], message: str, severity: Severity = "error"
    ) -> Iterable[Finding]:
        """A finding that names the number of ranks."""
        evidence = [Evidence("ranks", float(len(chart.ranks)))]
        evidence += [
            Evidence("l2 on the first rank", hit.value, hit.site, "l2", hit.step) for hit in hits[:1]
        ]
        yield from self.found(hits, message, severity=severity, evidence=evidence)


@final
@dataclass(frozen=True)
class RanksDrift(_RankRule):
    """Equal at first, and then not."""

    name: ClassVar[str] = "ranks-drift"
    concludes: ClassVar[str] = (
        "A parameter that was the same on every rank no longer is: its gradient is not shared."
    )
    wrong_if: ClassVar[str] = "The ranks are meant to go apart, as in local updates between rare averages."
    causes: ClassVar[tuple[str, ...]] = (
        "the forward is called on model.module, past the wrapper that shares gradients",
        "no_sync() is left on, or the model was moved or changed after it was wrapped",
        "gradients of a replicated parameter are clipped or reduced on one rank only",
    )
    fix: ClassVar[str] = "loss = loss_of(ddp_model(x), y)  # the wrapped model, not ddp_model.module"

    def compare(self, chart: Chart) -> Iterable[Finding]:
        found = agreement(chart, "param")
        if found is None:
            return
        hits: list[Hit] = []
        odd: dict[int, set[int]] = {}  # by step, the ranks that go apart there
        for row, place in enumerate(found.places):
            if found.seen[row, 0] and found.same[row, 0]:
                apart = np.flatnonzero(found.seen[row] & ~found.same[row])
                if len(apart):
                    step = int(found.steps[apart[0]])
                    hits.append(Hit(place.name, step, float(len(apart)), place.index))
                    odd.setdefault(step, set()).add(int(found.alone[row, apart[0]]))
        first = odd[min(odd)] if odd else set()
        who = "differs" if len(first) != 1 or -1 in first else f"rank {first.pop()} alone differs"
        yield from self.say(
            chart, hits, f"{{site}}{{also}} was the same on all ranks and {who} from step {{step}} on"
        )


@final
@dataclass(frozen=True)
class RanksApart(_RankRule):
    """Different from the start, though gradients are shared."""

    name: ClassVar[str] = "ranks-apart"
    concludes: ClassVar[str] = "Ranks share their gradients, but began with different weights."
    wrong_if: ClassVar[str] = "Never: a shared gradient belongs to one set of weights."
    causes: ClassVar[tuple[str, ...]] = (
        "each rank initialised its weights with a seed of its own, and nothing sent those of one to all",
    )
    fix: ClassVar[str] = (
        "for p in model.parameters(): dist.broadcast(p.data, 0)  # or wrap it in DistributedDataParallel"
    )

    def compare(self, chart: Chart) -> Iterable[Finding]:
        weights, gradients = agreement(chart, "param"), agreement(chart, "param_grad")
        if weights is None or gradients is None:
            return
        shared = {
            (place.module, place.leaf)
            for row, place in enumerate(gradients.places)
            if gradients.seen[row, 0] and gradients.same[row, 0]
        }
        hits = [
            Hit(place.name, int(weights.steps[0]), 0.0, place.index)
            for row, place in enumerate(weights.places)
            if (place.module, place.leaf) in shared and weights.seen[row, 0] and not weights.same[row, 0]
        ]
        yield from self.say(
            chart, hits, "{site}{also} differs between ranks from the start, though gradients are shared"
        )


def _is_replicated(chart: Chart) -> bool | None:
    """Whether all of the model is on every rank; None where that is not known."""
    found = agreement(chart, "param")
    if found is None or not found.seen[:, 0].any():
        return None
    return bool(found.same[:, 0][found.seen[:, 0]].all())


def _inputs(chart: Chart) -> Agreement | None:
    found = agreement(chart, "input")
    if found is None:
        return None
    rows = [row for row, place in enumerate(found.places) if is_model_input(place)]
    return Agreement(
        [found.places[row] for row in rows],
        found.steps,
        found.same[rows],
        found.seen[rows],
        found.alone[rows],
    )


@final
@dataclass(frozen=True)
class RanksFedAlike(_RankRule):
    """Replicas that each get the same batch."""

    length: int = 3

    name: ClassVar[str] = "ranks-fed-alike"
    concludes: ClassVar[str] = "Every rank trains on the same data: all but one do nothing new."
    needs: ClassVar[tuple[Need, ...]] = (Need("param", "l2"), Need("input", "l2"))
    wrong_if: ClassVar[str] = "The ranks share one batch on purpose, to check each other."
    causes: ClassVar[tuple[str, ...]] = ("no DistributedSampler, or the same seed and no rank in it",)
    fix: ClassVar[str] = "DataLoader(data, sampler=DistributedSampler(data))"

    def compare(self, chart: Chart) -> Iterable[Finding]:
        given = _inputs(chart)
        if given is None or not given.places or not _is_replicated(chart):
            return
        alike = np.where(given.seen, given.same, True).all(axis=0) & given.seen.any(axis=0)
        column = first_run(np.asarray(alike), self.length)
        if column is not None:
            hits = [Hit(given.places[0].name, int(given.steps[column]), float(self.length))]
            yield from self.say(chart, hits, "all ranks are given the same batch ({site})", "warning")


@final
@dataclass(frozen=True)
class RanksDisagree(_RankRule):
    """One question, as many answers as ranks, in a model whose parts are spread over them."""

    length: int = 1

    name: ClassVar[str] = "ranks-disagree"
    concludes: ClassVar[str] = (
        "Ranks that hold parts of one model get the same input and give different answers."
    )
    needs: ClassVar[tuple[Need, ...]] = (Need("param", "l2"), Need("input", "l2"), Need("output", "l2"))
    wrong_if: ClassVar[str] = "The answer is left in parts on purpose, for a loss that joins them."
    causes: ClassVar[tuple[str, ...]] = (
        "an all-reduce is missing, or is of the wrong group or operation",
        "dropout draws other numbers on each rank",
    )
    fix: ClassVar[str] = "dist.all_reduce(partial_sum)  # after each row-parallel layer"

    def compare(self, chart: Chart) -> Iterable[Finding]:
        given, said = _inputs(chart), agreement(chart, "output")
        if given is None or said is None or not given.places or _is_replicated(chart) is not False:
            return
        asked = np.where(given.seen, given.same, True).all(axis=0) & given.seen.any(axis=0)
        rows = [row for row, place in enumerate(said.places) if not place.module]
        for row in rows:
            column = first_run(np.asarray(asked & said.seen[row] & ~said.same[row]), self.length)
            if column is None:
                continue
            apart = [
                place
                for number, place in enumerate(said.places)
                if said.seen[number, column] and not said.same[number, column]
            ]
            step = int(said.steps[column])
            hits = [Hit(said.places[row].name, step, 0.0, -1)]
            hits += [Hit(place.name, step, 0.0, place.index) for place in apart]
            yield from self.say(
                chart, hits, "ranks were given the same input and give different answers ({site}{also})"
            )
