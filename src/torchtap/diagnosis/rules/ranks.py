"""Ranks against each other: replicas that drift apart, that began apart, that are fed the same, that disagree.

Judged on a finished run that several ranks wrote; `replicas` says what they hold alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.continuity import jumped
from torchtap.diagnosis.finding import Evidence, Finding, Severity, Trust
from torchtap.diagnosis.replicas import Replicas, common_steps, replicas, values_on_ranks
from torchtap.diagnosis.rules.base import Hit, Need, Rule
from torchtap.diagnosis.rules.data import is_model_input
from torchtap.diagnosis.rules.windows import first_run

__all__ = ["RankRule", "RanksApart", "RanksDisagree", "RanksDrift", "RanksFedAlike", "listed"]


def listed(ranks: Iterable[int]) -> str:
    """``rank 2``, ``ranks 0, 1 and 3``."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


class RankRule(Rule):
    """A rule on ranks beside each other; silent where there is one."""

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
class RanksDrift(RankRule):
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
        steps = common_steps(chart)
        hits: list[Hit] = []
        odd: dict[int, set[int | None]] = {}  # by step, the ranks that go apart there
        for each in replicas(chart, "param"):
            apart = np.flatnonzero(each.apart)
            if each.same_at_first and len(apart):
                step = int(steps[apart[0]])
                hits.append(Hit(each.place.name, step, float(len(apart)), each.place.index))
                odd.setdefault(step, set()).add(_odd_one(chart, each, int(apart[0]), step))
        first = odd[min(odd)] if odd else {None}
        who = "differs" if len(first) != 1 or None in first else f"rank {first.pop()} alone differs"
        yield from self.say(
            chart, hits, f"{{site}}{{also}} was the same on all ranks and {who} from step {{step}} on"
        )


def _odd_one(chart: Chart, each: Replicas, column: int, step: int) -> int | None:
    """The rank that went its own way: unlike all others, or the one whose weight is not what its update left."""
    alone = each.alone(column)
    if alone is not None:
        return alone
    changed = [rank for rank in each.ranks if jumped(chart.ranks[rank], each.place.name, step)]
    return changed[0] if len(changed) == 1 else None


@final
@dataclass(frozen=True)
class RanksApart(RankRule):
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
        shared = {
            (each.place.module, each.place.leaf)
            for each in replicas(chart, "param_grad")
            if each.same_at_first
        }
        hits: list[Hit] = []
        alone: set[int | None] = set()
        for each in replicas(chart, "param"):
            place = each.place
            replicated = each.stated or (place.module, place.leaf) in shared
            if replicated and each.seen[0] and not each.same[0]:
                hits.append(Hit(place.name, int(common_steps(chart)[0]), 0.0, place.index))
                alone.add(each.alone(0))
        who = "" if len(alone) != 1 or None in alone else f" (rank {alone.pop()} is unlike all others)"
        yield from self.say(
            chart,
            hits,
            f"{{site}}{{also}} differs between ranks from the start, though gradients are shared{who}",
        )


def _is_replicated(chart: Chart) -> bool | None:
    """Whether all of the model is on every rank; None where that is not known."""
    sites = {place.name for own in chart.ranks.values() for place in own.grid("l2", "param").places}
    if not sites or not len(common_steps(chart)):
        return None
    whole = {
        each.place.name
        for each in replicas(chart, "param")
        if len(each.ranks) == len(chart.ranks) and (each.same[0] or not each.seen[0])
    }
    return whole == sites


def _inputs(chart: Chart) -> dict[int, npt.NDArray[np.float64]]:
    """By rank: what the model was given, as statistics of all inputs at the common steps (number, step)."""
    tables = [values_on_ranks(chart, "input", statistic) for statistic in ("mean", "l1", "l2", "absmax")]
    sites = {
        place.name
        for own in chart.ranks.values()
        for place in own.grid("l2", "input").places
        if is_model_input(place)
    }
    found: dict[int, npt.NDArray[np.float64]] = {}
    for rank in chart.ranks:
        rows = [row for table in tables for site, row in sorted(table[rank].items()) if site in sites]
        if rows:
            found[rank] = np.stack(rows)
    return found


def _alike(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """The steps at which two ranks were given the same."""
    if left.shape != right.shape:
        return np.zeros(left.shape[1], np.bool_)
    there = np.isfinite(left) & np.isfinite(right)
    return np.asarray(np.where(there, left == right, True).all(axis=0) & there.any(axis=0), np.bool_)


@final
@dataclass(frozen=True)
class RanksFedAlike(RankRule):
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
        replicated = _is_replicated(chart)
        pairs: list[tuple[int, int, int]] = []  # the column by which it is certain, and two ranks
        for one, other in combinations(given, 2):
            if _reads_other_data(chart, one, other, replicated):
                column = first_run(_alike(given[one], given[other]), self.length)
                if column is not None:
                    pairs.append((column - self.length + 1, one, other))
        if not pairs:
            return
        column = min(pairs)[0]
        ranks = {rank for at, *two in pairs if at == column for rank in two}
        who = "all ranks" if ranks == set(chart.ranks) else listed(ranks)
        hits = [Hit(_input_site(chart), int(common_steps(chart)[column]), float(self.length))]
        yield from self.say(chart, hits, f"{who} are given the same batch ({{site}})", "warning")


def _reads_other_data(chart: Chart, one: int, other: int, replicated: bool | None) -> bool:
    """Whether two ranks are to have different samples: they differ along an axis that divides the batch."""
    site = _input_site(chart)
    first, second = chart.ranks[one].placed(site), chart.ranks[other].placed(site)
    if first is None or second is None or len(first.axes) != len(second.axes):
        return bool(replicated)
    kinds = {a.share.kind for a, b in zip(first.axes, second.axes, strict=True) if a.at != b.at}
    return kinds == {"batch"} or (kinds == {"unknown"} and bool(replicated))


def _input_site(chart: Chart) -> str:
    """The model's first argument."""
    places = (place for own in chart.ranks.values() for place in own.grid("l2", "input").places)
    return next((place.name for place in places if is_model_input(place)), ":input")


@final
@dataclass(frozen=True)
class RanksDisagree(RankRule):
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
        given = _inputs(chart)
        if len(given) < len(chart.ranks) or _is_replicated(chart) is not False:
            return
        first, *others = given.values()
        asked = np.all([_alike(first, other) for other in others], axis=0)
        said = [each for each in replicas(chart, "output") if len(each.ranks) == len(chart.ranks)]
        steps = common_steps(chart)
        for answer in (each for each in said if not each.place.module):
            column = first_run(np.asarray(asked & answer.apart), self.length)
            if column is None:
                continue
            step = int(steps[column])
            hits = [Hit(answer.place.name, step, 0.0, -1)]
            hits += [Hit(each.place.name, step, 0.0, each.place.index) for each in said if each.apart[column]]
            yield from self.say(
                chart, hits, "ranks were given the same input and give different answers ({site}{also})"
            )
