"""Gradients of ranks: not shared, shared twice, or changed on one rank after they were.

Two invariants. What an optimizer uses for a weight that every rank has must be the same on every rank. And it must be
the average of what the ranks computed, which a projection tells, since it is linear.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.facts import Fact
from torchtap.diagnosis.finding import Finding, Trust
from torchtap.diagnosis.replicas import Replicas, common_steps, replicas, values_on_ranks
from torchtap.diagnosis.rules.base import Hit, Need
from torchtap.diagnosis.rules.ranks import RankRule
from torchtap.diagnosis.rules.windows import first_run
from torchtap.plan.names import read_name, site_name

__all__ = ["PAST_THE_WRAPPER", "SCALED", "UNSYNCED", "RanksScale", "RanksUnreduced"]

# Facts of a rank.
UNSYNCED, PAST_THE_WRAPPER, SCALED = "gradients-unsynced", "past-the-wrapper", "gradients-scaled"
_L2 = 2  # its place among the prints
Numbers = npt.NDArray[np.float64]


@final
@dataclass(frozen=True)
class RanksUnreduced(RankRule):
    """A weight that every rank has is updated by a gradient that every rank has for itself."""

    alike: float = 1e-3  # factors of a rank's gradients that differ by less are one factor

    name: ClassVar[str] = "ranks-unreduced"
    concludes: ClassVar[str] = (
        "Ranks update one and the same weight by different gradients: they were not reduced, or changed after."
    )
    needs: ClassVar[tuple[Need, ...]] = (Need("param", "l2"), Need("param_grad", "l2"))
    wrong_if: ClassVar[str] = "The ranks are meant to go apart, as in local updates between rare averages."
    causes: ClassVar[tuple[str, ...]] = (
        "no all-reduce of the gradient: past the wrapper, under no_sync(), or of a norm that every rank of a "
        "tensor-parallel group has",
        "one rank clips or scales its gradients by itself",
    )
    fix: ClassVar[str] = (
        "dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)  # before optimizer.step(), on every rank"
    )

    def compare(self, chart: Chart) -> Iterable[Finding]:
        steps = common_steps(chart)
        weights = {(each.place.name, each.ranks): each for each in replicas(chart, "param")}
        moves = {(each.place.name, each.ranks): each for each in replicas(chart, "update")}
        hits: list[Hit] = []
        first: dict[int, list[Replicas]] = {}
        for each in replicas(chart, "param_grad"):
            module, _, leaf, _ = read_name(each.place.name)
            weight = weights.get((site_name(module, "param", leaf), each.ranks))
            move = moves.get((site_name(module, "update", leaf), each.ranks))
            column = None if weight is None else _first_apart(each, weight, move)
            if column is not None:
                hits.append(Hit(each.place.name, int(steps[column]), 0.0, each.place.index))
                first.setdefault(column, []).append(each)
        if hits:
            column = min(first)
            told, causes, fix = _why(chart, int(steps[column]))
            who = told or self._who(first[column], column)
            message = f"{{site}}{{also}} is not the same on all ranks at step {{step}}: {who}"
            yield from self.found(hits, message, severity="error", causes=(*causes, *self.causes), fix=fix)

    def _who(self, found: list[Replicas], column: int) -> str:
        """Which rank's gradients are other than the rest's, and by how much."""
        alone = {each.alone(column) for each in found}
        ranks = found[0].ranks
        sizes = np.array([each.prints[:, _L2, column] for each in found if each.ranks == ranks])
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = sizes / sizes.max(axis=1, keepdims=True)
        one_factor = len(sizes) > 1 and bool(
            (np.ptp(factors, axis=0) <= self.alike * factors.max(axis=0)).all()
        )
        small = ranks[int(np.argmin(factors[0]))]
        if one_factor and (len(ranks) == 2 or alone == {small}):
            return f"rank {small}'s gradients are {factors[0].min():.3g} × the others', clipped or scaled there alone"
        if len(alone) == 1 and None not in alone:
            return f"rank {alone.pop()} alone has another one"
        return "each rank uses its own, which nobody reduced"


def _first_apart(gradient: Replicas, weight: Replicas, move: Replicas | None) -> int | None:
    """The first step at which one weight got several gradients, and was changed by them."""
    if not weight.same_at_first:
        return None
    changed = np.r_[weight.apart[1:], False]  # a step later
    if move is not None:
        changed |= move.apart
    found = np.flatnonzero(gradient.apart & weight.seen & weight.same & changed)
    return int(found[0]) if len(found) else None


def _why(chart: Chart, step: int) -> tuple[str, tuple[str, ...], str]:
    """What a rank said of how its gradients came: a sentence, the cause, and what to change."""
    told: list[tuple[Fact, str, str, str]] = []
    for own in chart.ranks.values():
        told += [
            (fact, "no_sync() was on in the backward before the update", "no_sync() is left on",
             "with ddp_model.no_sync():  # around all micro-batches but the last")
            for fact in own.facts(UNSYNCED)
        ]  # fmt: skip
        told += [
            (fact, "the forward went past the wrapper that reduces them",
             "the forward is called on ddp_model.module", "loss = loss_of(ddp_model(x), y)  # not ddp_model.module")
            for fact in own.facts(PAST_THE_WRAPPER)
        ]  # fmt: skip
    for fact, sentence, cause, fix in told:
        if fact.step <= step:
            return sentence, (cause,), fix
    return "", (), ""


@final
@dataclass(frozen=True)
class RanksScale(RankRule):
    """What is used is not the average of what was computed, but so many times it as there are ranks."""

    length: int = 2
    slack: float = 0.02
    most: float = 0.9  # of the sites have to say the same
    clear: float = 1e-3  # a sum that cancels to less than this of its parts says nothing

    name: ClassVar[str] = "ranks-scale"
    concludes: ClassVar[str] = (
        "Gradients are so many times, or one of so many parts of, the ranks' average as there are ranks."
    )
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("param_grad", "projection"),
        Need("param_grad_local", "projection"),
    )
    wrong_if: ClassVar[str] = (
        "Gradients are summed on purpose, and the loss or the learning rate is made for it."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "an all-reduce by hand beside the one of the wrapper",
        "summed where an average belongs, or divided by the number of ranks twice",
    )
    fix: ClassVar[str] = "loss.backward()  # the wrapper reduces; no dist.all_reduce(p.grad) after it"

    def compare(self, chart: Chart) -> Iterable[Finding]:
        if any(own.facts(SCALED) for own in chart.ranks.values()):
            return  # what ranks computed is in other units than what the optimizer got
        ratios, sites = self._ratios(chart)
        if not sites:
            return
        world = len(chart.ranks)
        for factor, words in ((float(world), f"{world} times"), (1 / world, f"1/{world} of")):
            with np.errstate(invalid="ignore"):
                near = np.abs(ratios - factor) <= self.slack * factor
            told = np.isfinite(ratios).sum(axis=0)
            holds = (told > 0) & (near.sum(axis=0) >= self.most * np.maximum(told, 1))
            column = first_run(np.asarray(holds), self.length)
            if column is None:
                continue
            column -= self.length - 1
            step = int(common_steps(chart)[column])
            hits = [Hit(site, step, factor, order) for order, site in enumerate(sites) if near[order, column]]
            message = f"{{site}}{{also}} is {words} the average of what {world} ranks computed, from step {{step}} on"
            yield from self.found(hits, message, severity="warning")

    def _ratios(self, chart: Chart) -> tuple[Numbers, list[str]]:
        """Of each gradient, at each step: what is used over the average of what the ranks computed."""
        used = values_on_ranks(chart, "param_grad", "projection")
        own = values_on_ranks(chart, "param_grad_local", "projection")
        sizes = values_on_ranks(chart, "param_grad_local", "l2")
        rows, sites = [], []
        for each in replicas(chart, "param_grad"):
            module, _, leaf, _ = read_name(each.place.name)
            local = site_name(module, "param_grad_local", leaf)
            if len(each.ranks) < len(chart.ranks) or any(local not in own[rank] for rank in each.ranks):
                continue
            parts = np.stack([own[rank][local] for rank in each.ranks])
            size = np.stack([sizes[rank][local] for rank in each.ranks]).max(axis=0)
            average = parts.mean(axis=0)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(
                    np.abs(average) > self.clear * size,
                    used[each.ranks[0]][each.place.name] / average,
                    np.nan,
                )
            rows.append(np.where(each.same, ratio, np.nan))
            sites.append(each.place.name)
        return np.array(rows), sites
