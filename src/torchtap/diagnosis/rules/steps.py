"""The size of the optimizer's steps: too large, too small, lost in rounding, gone with the learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import EARLY, Chart, ChartGrid, Numbers
from torchtap.diagnosis.finding import Evidence, Finding, Severity, Trust
from torchtap.diagnosis.places import ChartedSite
from torchtap.diagnosis.rules.base import Hit, Need, Rule, hit_at
from torchtap.diagnosis.rules.gradients import is_norm
from torchtap.diagnosis.rules.progress import LOSS
from torchtap.diagnosis.rules.windows import LAST, first_run, first_run_of, last_known, median_of_columns
from torchtap.plan.names import site_name

__all__ = ["LostUpdates", "RateGone", "StepTooLarge", "StepTooSmall"]


def is_weight(place: ChartedSite) -> bool:
    """Whether a site is of a matrix of weights, not of a bias, a norm or an embedding."""
    return (
        place.leaf.endswith("weight")
        and not is_norm(place)
        and "Embedding" not in place.module_class
        and (place.shape is None or len(place.shape) >= 2)
    )


def is_short_weight(place: ChartedSite) -> bool:
    """A matrix of weights in a short format. In float32 it is the update that is too small, not the format."""
    return is_weight(place) and place.dtype not in ("float32", "float64")


def _rates(chart: Chart) -> npt.NDArray[np.float64] | None:
    """The largest learning rate of each kept step; None where none was recorded."""
    found = chart.grid("value", "lr")
    if not found:
        return None
    return np.asarray(np.nan_to_num(found.values, nan=-1.0).max(axis=0), np.float64)


def _still_warming(chart: Chart) -> npt.NDArray[np.bool_]:
    """Steps at which the learning rate was on its way up."""
    rates = _rates(chart)
    if rates is None:
        return np.zeros(len(chart.steps), np.bool_)
    rising = np.diff(rates, append=rates[-1:]) > 0
    return np.asarray(rising | (rates == 0), np.bool_)


def _recorded(grid: ChartGrid) -> npt.NDArray[np.bool_]:
    """The columns in which anything was recorded."""
    return np.asarray((~np.isnan(grid.values)).any(axis=0), np.bool_)


@final
@dataclass(frozen=True)
class RateGone(Rule):
    """The learning rate is zero, or a vanishing part of what it was, and stays there."""

    length: int = 5  # records in a row, and a quarter of all
    share: float = 1e-4  # of the largest rate so far

    name: ClassVar[str] = "learning-rate-gone"
    concludes: ClassVar[str] = (
        "The learning rate has fallen to nothing and stays there, while gradients still come."
    )
    trust: ClassVar[Trust] = "history"
    needs: ClassVar[tuple[Need, ...]] = (Need("lr", "value"),)
    wrong_if: ClassVar[str] = "The training goes on after its schedule has ended, on purpose."
    causes: ClassVar[tuple[str, ...]] = (
        "scheduler.step() is called for each batch with a schedule of epochs",
        "a learning rate of 0 in the configuration",
        "the schedule is shorter than the training",
    )
    fix: ClassVar[str] = "scheduler.step()  # once an epoch, or make the schedule of batches"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        rates = _rates(chart)
        if rates is None or len(rates) < self.length:
            return
        most = np.maximum.accumulate(rates)
        gone = (rates >= 0) & ((rates <= self.share * most) | (rates == 0))
        falling = rates <= np.concatenate([rates[:1], rates[:-1]])
        columns = np.arange(len(rates))
        behind = np.zeros(len(rates), np.int64)  # how many records in a row it has been gone
        for column in range(len(rates)):
            behind[column] = (
                behind[column - 1] + 1 if gone[column] and falling[column] and column else int(gone[column])
            )
        enough = behind >= np.maximum(self.length, (columns + 1) // 4)
        ends = np.flatnonzero(enough)
        if not len(ends):
            return
        step = int(chart.steps[ends[0]])
        site = next(place.name for place in chart.places() if place.kind == "lr")
        evidence = [
            Evidence("learning rate", float(rates[ends[0]]), site, "value", step),
            Evidence("largest learning rate so far", float(most[ends[0]]), site, "value"),
        ]
        message = "the learning rate is {value:.3g} since several records: the weights no longer change"
        yield from self.found([Hit(site, step, float(rates[ends[0]]))], message, evidence=evidence)


@final
@dataclass(frozen=True)
class StepTooLarge(Rule):
    """Each update changes the weights by a tenth and more, and the loss gets worse."""

    ratio: float = 0.1  # of an update to its weight
    worse: float = 1.5  # times the loss of the first steps
    length: int = 3

    name: ClassVar[str] = "step-too-large"
    concludes: ClassVar[str] = "Updates are so large against the weights that the training diverges."
    trust: ClassVar[Trust] = "history"
    needs: ClassVar[tuple[Need, ...]] = (Need("update", "ratio"), Need("value", "value"))
    wrong_if: ClassVar[str] = (
        "The loss is not one that is to fall, as in adversarial or reinforcement learning."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "the learning rate is too large",
        "no warm-up, or no clipping of gradients",
        "inputs or targets that are not scaled",
    )
    fix: ClassVar[str] = (
        "optimizer = AdamW(model.parameters(), lr=1e-3)  # try a tenth, or a hundredth, of yours"
    )

    def judge(self, chart: Chart) -> Iterable[Finding]:
        ratios = chart.grid("ratio", "update", where=is_weight)
        if not ratios or len(chart.steps) < self.length + 1:
            return
        middle = last_known(median_of_columns(ratios.values))  # not every record has what the optimizer did
        worse = self._worse(chart)
        # The first updates may be large (Adam, small weights); what matters is that they stay and do harm.
        large = np.nan_to_num(middle) > self.ratio
        wild = np.nan_to_num(middle) > 10 * self.ratio  # the weights are exchanged at each step
        harm = (large & worse) | (wild & self._not_better(chart))
        column = first_run(harm, self.length)
        if column is None:
            return
        known = ratios.values[:, np.flatnonzero(_recorded(ratios)[: column + 1])[-1]]
        rows = np.argsort(-np.nan_to_num(known))
        at = ratios.step(column)
        hits = [hit_at(ratios.places[row], at, known[row]) for row in sorted(rows[:5])]
        evidence = [
            Evidence("update over weight, middle of all", float(middle[column]), hits[0].site, "ratio", at),
            Evidence("loss", float(self._loss(chart)[column]), LOSS, "value", at),
        ]
        message = f"updates change weights by {middle[column]:.0%} a step and the loss gets worse ({{site}}{{also}})"
        yield from self.found(hits, message, severity="error", evidence=evidence)

    def _loss(self, chart: Chart) -> npt.NDArray[np.float64]:
        steps, values = chart.series(LOSS)
        loss = np.full(len(chart.steps), np.nan)
        loss[np.isin(chart.steps, steps)] = values
        return loss

    def _worse(self, chart: Chart) -> npt.NDArray[np.bool_]:
        loss = self._loss(chart)
        there = loss[np.isfinite(loss)]
        if not len(there):
            return np.zeros(len(loss), np.bool_)
        first = float(there[0])
        over = loss > first + (self.worse - 1) * max(abs(first), 1e-3)
        return np.asarray(over | np.isinf(loss), np.bool_)

    def _not_better(self, chart: Chart) -> npt.NDArray[np.bool_]:
        loss = self._loss(chart)
        there = loss[np.isfinite(loss)]
        return np.asarray(loss >= there[0], np.bool_) if len(there) else np.zeros(len(loss), np.bool_)


@final
@dataclass(frozen=True)
class StepTooSmall(Rule):
    """From the start each update is a vanishing part of freshly initialised weights."""

    ratio: float = 1.5e-4
    length: int = 6  # records
    steps: int = 10  # momentum makes updates grow for about so many

    name: ClassVar[str] = "step-too-small"
    concludes: ClassVar[str] = (
        "Updates are so small against the weights that nothing will be learned in any sensible time."
    )
    trust: ClassVar[Trust] = "limit"
    needs: ClassVar[tuple[Need, ...]] = (Need(""), Need("update", "ratio"), Need("param_grad", "rms"))
    wrong_if: ClassVar[str] = (
        "The weights are trained already and only to be nudged; fresh weights alone are judged."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "the learning rate is too small",
        "the loss is divided by too much, or its gradient is clipped to almost nothing",
    )
    fix: ClassVar[str] = "optimizer = AdamW(model.parameters(), lr=1e-3)  # try a hundred times yours"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        if not chart.structure.fresh:
            return
        ratios = chart.grid("ratio", "update", where=is_weight)
        if not ratios:
            return
        # The largest, not the middle: branches that begin at zero wait for the others.
        middle = np.nan_to_num(ratios.values, posinf=0.0).max(axis=0)
        small = (middle > 0) & (middle < self.ratio) & ~_still_warming(chart)
        since_start = np.logical_and.accumulate(
            small | _still_warming(chart) | chart.skipped | ~_recorded(ratios)
        )
        columns = np.flatnonzero((small & since_start)[:EARLY])[self.length - 1 :]
        first = int(np.argmax(small))
        columns = columns[ratios.steps[columns] - ratios.steps[first] >= self.steps - 1]
        if not len(columns):
            return
        column = int(columns[0])
        step = ratios.step(column)
        hits = [hit_at(place, step, middle[column]) for place in ratios.places]
        evidence = [
            Evidence("largest update over its weight", float(middle[column]), hits[0].site, "ratio", step)
        ]
        message = "updates are at most {value:.0e} of the weights from the start ({site}{also}), though gradients come"
        yield from self.found(hits, message, evidence=evidence)


def _pairs(changed: ChartGrid, gradients: ChartGrid) -> Iterator[tuple[ChartedSite, Numbers, int]]:
    """The weights that have both: a row of updates, and the number of the row of gradients."""
    rows = {place.name: row for row, place in enumerate(gradients.places)}
    for place, values in zip(changed.places, changed.values, strict=True):
        other = rows.get(site_name(place.module, "param_grad", place.leaf))
        if other is not None:
            yield place, values, other


@final
@dataclass(frozen=True)
class LostUpdates(Rule):
    """The optimizer asks for a change and most elements stay as they were."""

    share: float = 0.5  # of the elements with a gradient
    length: int = 2

    name: ClassVar[str] = "lost-updates"
    concludes: ClassVar[str] = (
        "Updates are below the resolution of the weights' dtype: most elements never change."
    )
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need("update", "zeros"), Need("param_grad", "zeros"))
    wrong_if: ClassVar[str] = (
        "The optimizer keeps what was lost, by Kahan sums or stochastic rounding (then it is info)."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "bfloat16 or float16 weights with a small learning rate and no float32 copy",
        "a learning rate that is too small for the dtype",
    )
    fix: ClassVar[str] = "model.float()  # and torch.autocast('cuda', torch.bfloat16) around the forward"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        changed = chart.grid("zeros", "update", last=LAST, where=is_short_weight)
        gradients = chart.grid("zeros", "param_grad", last=LAST, where=is_weight)
        sizes = chart.grid("rms", "param_grad", where=is_weight)
        if not changed or not gradients or len(sizes.places) != len(gradients.places):
            return
        first = np.nan_to_num(sizes.values[:, :8]).max(axis=1, keepdims=True)
        # Nothing is lost where nothing is left to do.
        asked = sizes.values[:, -changed.values.shape[1] :] > 1e-3 * first
        idle = (_still_warming(chart) | chart.skipped)[-changed.values.shape[1] :]
        hits = []
        for place, stays, other in _pairs(changed, gradients):
            lost = stays - gradients.values[other]
            lost_now = (lost > self.share) & asked[other] & ~idle
            column = first_run_of(lost_now, ~np.isnan(lost), self.length)
            if column is not None:
                hits.append(hit_at(place, changed.step(column), lost[column]))
        if len(hits) * 2 < len(changed.places):
            return  # a layer or two may have settled
        known = all(name.startswith("torch.optim") for name in chart.structure.optimizers)
        severity: Severity = "warning" if known else "info"
        message = "{value:.0%} of {site}{also} have a gradient and do not change: updates are rounded away"
        evidence = [
            Evidence("share of elements that stay", h.value, h.site, "zeros", h.step) for h in hits[:1]
        ]
        yield from self.found(hits, message, severity=severity, evidence=evidence)
