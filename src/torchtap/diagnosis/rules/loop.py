"""The training loop: how gradients, modes, learning rate and optimizer are used, and gradients that never arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

from torchtap.diagnosis.chart import EARLY, LOSS, Chart, ChartedSite, ChartGrid, Numbers
from torchtap.diagnosis.finding import Evidence, Finding, Severity
from torchtap.diagnosis.rule_type import (
    LAST,
    Flags,
    Hit,
    Rule,
    built_in,
    first_run,
    first_run_of,
    hit_at,
    is_norm,
    is_weight,
    is_whole,
    last_known,
    median_of_columns,
    of_facts,
)
from torchtap.plan.names import site_name


@built_in("not-in-optimizer")
def not_in_optimizer(rule: Rule, chart: Chart) -> Iterable[Finding]:
    """Report parameters outside of optimizers. If most of the model is outside, that is on purpose: an info."""
    held = chart.structure.optimized & chart.structure.trainable
    inside = sum(chart.structure.sizes.get(site, 0) for site in held)
    outside = sum(chart.structure.sizes.get(fact.site, 0) for fact in chart.facts(rule.name))
    message = "{site}{also} gets gradients, but is in no optimizer: it never learns"
    yield from of_facts(rule, chart, message, "error" if inside >= outside else "info")


def is_short_weight(place: ChartedSite) -> bool:
    """A matrix of weights in a short format. In float32 it is the update that is too small, not the format."""
    return is_weight(place) and place.dtype not in ("float32", "float64")


def _rates(chart: Chart) -> Numbers | None:
    """The largest learning rate of each kept step; None where none was recorded."""
    found = chart.grid("value", "lr")
    if not found:
        return None
    return np.asarray(np.nan_to_num(found.values, nan=-1.0).max(axis=0), np.float64)


def _still_warming(chart: Chart) -> Flags:
    """Steps at which the learning rate was on its way up."""
    rates = _rates(chart)
    if rates is None:
        return np.zeros(len(chart.steps), np.bool_)
    rising = np.diff(rates, append=rates[-1:]) > 0
    return np.asarray(rising | (rates == 0), np.bool_)


def _recorded(grid: ChartGrid) -> Flags:
    """The columns in which anything was recorded."""
    return np.asarray((~np.isnan(grid.values)).any(axis=0), np.bool_)


@built_in("learning-rate-gone")
def learning_rate_gone(
    rule: Rule,
    chart: Chart,
    *,
    length: int = 5,  # records in a row, and a quarter of all
    share: float = 0.0001,  # of the largest rate so far
) -> Iterable[Finding]:
    """The learning rate is zero, or a vanishing part of what it was, and stays there."""
    rates = _rates(chart)
    if rates is None or len(rates) < length:
        return
    most = np.maximum.accumulate(rates)
    gone = (rates >= 0) & ((rates <= share * most) | (rates == 0))
    falling = rates <= np.concatenate([rates[:1], rates[:-1]])
    columns = np.arange(len(rates))
    behind = np.zeros(len(rates), np.int64)  # how many records in a row it has been gone
    for column in range(len(rates)):
        behind[column] = (
            behind[column - 1] + 1 if gone[column] and falling[column] and column else int(gone[column])
        )
    enough = behind >= np.maximum(length, (columns + 1) // 4)
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
    yield from rule.found([Hit(site, step, float(rates[ends[0]]))], message, evidence=evidence)


@built_in("step-too-large")
def step_too_large(
    rule: Rule,
    chart: Chart,
    *,
    ratio: float = 0.1,  # of an update to its weight
    times: float = 1.5,  # times the loss of the first steps
    length: int = 3,
) -> Iterable[Finding]:
    """Each update changes the weights by a tenth and more, and the loss gets worse."""
    ratios = chart.grid("ratio", "update", where=is_weight)
    if not ratios or len(chart.steps) < length + 1:
        return
    middle = last_known(median_of_columns(ratios.values))  # not every record has what the optimizer did
    worse = _worse(chart, times)
    # The first updates may be large (Adam, small weights); what matters is that they stay and do harm.
    large = np.nan_to_num(middle) > ratio
    wild = np.nan_to_num(middle) > 10 * ratio  # the weights are exchanged at each step
    harm = (large & worse) | (wild & _not_better(chart))
    column = first_run(harm, length)
    if column is None:
        return
    known = ratios.values[:, np.flatnonzero(_recorded(ratios)[: column + 1])[-1]]
    rows = np.argsort(-np.nan_to_num(known))
    at = ratios.step(column)
    hits = [hit_at(ratios.places[row], at, known[row]) for row in sorted(rows[:5])]
    evidence = [
        Evidence("update over weight, middle of all", float(middle[column]), hits[0].site, "ratio", at),
        Evidence("loss", float(_loss(chart)[column]), LOSS, "value", at),
    ]
    message = (
        f"updates change weights by {middle[column]:.0%} a step and the loss gets worse ({{site}}{{also}})"
    )
    yield from rule.found(hits, message, severity="error", evidence=evidence)


def _loss(chart: Chart) -> Numbers:
    steps, values = chart.series(LOSS)
    loss = np.full(len(chart.steps), np.nan)
    loss[np.isin(chart.steps, steps)] = values
    return loss


def _worse(chart: Chart, worse: float) -> Flags:
    loss = _loss(chart)
    there = loss[np.isfinite(loss)]
    if not len(there):
        return np.zeros(len(loss), np.bool_)
    first = float(there[0])
    over = loss > first + (worse - 1) * max(abs(first), 1e-3)
    return np.asarray(over | np.isinf(loss), np.bool_)


def _not_better(chart: Chart) -> Flags:
    loss = _loss(chart)
    there = loss[np.isfinite(loss)]
    return np.asarray(loss >= there[0], np.bool_) if len(there) else np.zeros(len(loss), np.bool_)


@built_in("step-too-small")
def step_too_small(
    rule: Rule,
    chart: Chart,
    *,
    ratio: float = 0.00015,
    length: int = 6,  # records
    steps: int = 10,  # momentum makes updates grow for about so many
) -> Iterable[Finding]:
    """From the start each update is a vanishing part of freshly initialised weights."""
    if not chart.structure.fresh:
        return
    ratios = chart.grid("ratio", "update", where=is_weight)
    if not ratios:
        return
    # The largest, not the middle: branches that begin at zero wait for the others.
    middle = np.nan_to_num(ratios.values, posinf=0.0).max(axis=0)
    small = (middle > 0) & (middle < ratio) & ~_still_warming(chart)
    since_start = np.logical_and.accumulate(
        small | _still_warming(chart) | chart.skipped | ~_recorded(ratios)
    )
    columns = np.flatnonzero((small & since_start)[:EARLY])[length - 1 :]
    first = int(np.argmax(small))
    columns = columns[ratios.steps[columns] - ratios.steps[first] >= steps - 1]
    if not len(columns):
        return
    column = int(columns[0])
    step = ratios.step(column)
    hits = [hit_at(place, step, middle[column]) for place in ratios.places]
    evidence = [
        Evidence("largest update over its weight", float(middle[column]), hits[0].site, "ratio", step)
    ]
    message = (
        "updates are at most {value:.0e} of the weights from the start ({site}{also}), though gradients come"
    )
    yield from rule.found(hits, message, evidence=evidence)


def _pairs(changed: ChartGrid, gradients: ChartGrid) -> Iterator[tuple[ChartedSite, Numbers, int]]:
    """The weights that have both: a row of updates, and the number of the row of gradients."""
    rows = {place.name: row for row, place in enumerate(gradients.places)}
    for place, values in zip(changed.places, changed.values, strict=True):
        other = rows.get(site_name(place.module, "param_grad", place.leaf))
        if other is not None:
            yield place, values, other


@built_in("lost-updates")
def lost_updates(
    rule: Rule,
    chart: Chart,
    *,
    share: float = 0.5,  # of the elements with a gradient
    length: int = 2,
) -> Iterable[Finding]:
    """The optimizer asks for a change and most elements stay as they were."""
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
        lost_now = (lost > share) & asked[other] & ~idle
        column = first_run_of(lost_now, ~np.isnan(lost), length)
        if column is not None:
            hits.append(hit_at(place, changed.step(column), lost[column]))
    if len(hits) * 2 < len(changed.places):
        return  # a layer or two may have settled
    known = all(name.startswith("torch.optim") for name in chart.structure.optimizers)
    severity: Severity = "warning" if known else "info"
    message = "{value:.0%} of {site}{also} have a gradient and do not change: updates are rounded away"
    evidence = [Evidence("share of elements that stay", h.value, h.site, "zeros", h.step) for h in hits[:1]]
    yield from rule.found(hits, message, severity=severity, evidence=evidence)


@final
@dataclass(frozen=True, slots=True)
class _Called:
    """What is known of one parameter: the module's place in the order of execution, if it was called at all."""

    site: str
    module: str
    order: int | None
    has_gradient: bool


def _parameters(chart: Chart) -> list[_Called]:
    """Every parameter that is meant to learn."""
    order: dict[str, int] = {}
    for place in chart.places():
        if place.kind == "output" and chart.has_come(place.name):
            order.setdefault(place.module, place.index)
    structure = chart.structure
    meant = structure.trainable & structure.optimized
    return [
        _Called(
            place.name,
            place.module,
            order.get(place.module),
            chart.has_come(site_name(place.module, "param_grad", place.leaf)),
        )
        for place in chart.places()
        if place.kind == "param" and place.name in meant
    ]


def _judged_at(chart: Chart, columns: int) -> int | None:
    """The step by which so many updates were recorded; None before."""
    done = np.flatnonzero(~chart.skipped)
    return int(chart.steps[done[columns - 1]]) if len(done) >= columns else None


@built_in("gradient-cut")
def gradient_cut(
    rule: Rule,
    chart: Chart,
    *,
    columns: int = 2,  # updates that were recorded
) -> Iterable[Finding]:
    """Everything before some point is called and gets no gradient; everything after it does."""
    step = _judged_at(chart, columns)
    called = sorted(
        (each for each in _parameters(chart) if each.order is not None), key=lambda each: each.order or 0
    )
    with_gradient = [index for index, each in enumerate(called) if each.has_gradient]
    if step is None or not with_gradient or with_gradient[0] == 0:
        return
    before = called[: with_gradient[0]]
    if len({each.module for each in before}) < 1:
        return
    last = before[-1]
    message = f"no gradient flows back past {{site}}: {len(before)} parameters up to there never get one"
    hits = [Hit(site_name(last.module, "output"), step, float(len(before)))]
    hits += [Hit(each.site, step, 0.0, 1 + index) for index, each in enumerate(before)]
    evidence = [Evidence("parameters without a gradient", float(len(before)))]
    yield from rule.found(hits, message, severity="error", evidence=evidence)


@built_in("no-gradient")
def no_gradient(rule: Rule, chart: Chart, *, columns: int = 3) -> Iterable[Finding]:
    """Called, but behind no part of the loss."""
    step = _judged_at(chart, columns)
    called = sorted(
        (each for each in _parameters(chart) if each.order is not None), key=lambda each: each.order or 0
    )
    with_gradient = [index for index, each in enumerate(called) if each.has_gradient]
    if step is None or not with_gradient:
        return
    hits = [
        Hit(each.site, step, 0.0, index)
        for index, each in enumerate(called)
        if not each.has_gradient and index > with_gradient[0]
    ]
    yield from rule.found(hits, "{site}{also} is called but never gets a gradient", severity="info")


@built_in("never-called")
def never_called(rule: Rule, chart: Chart, *, columns: int = 3) -> Iterable[Finding]:
    """Defined, meant to learn, never called."""
    step = _judged_at(chart, columns)
    parameters = _parameters(chart)
    if step is None or not any(each.order is not None for each in parameters):
        return
    hits = [
        Hit(each.site, step, 0.0, index)
        for index, each in enumerate(parameters)
        if each.order is None and not each.has_gradient
    ]
    yield from rule.found(hits, "{site}{also} belongs to a module that is never called", severity="info")


@built_in("zero-gradient")
def zero_gradient(
    rule: Rule,
    chart: Chart,
    *,
    length: int = 5,  # records in a row
) -> Iterable[Finding]:
    """A gradient that is exactly zero, step after step, while others are not."""
    found = chart.grid("absmax", "param_grad", last=length + 8)
    if not found:
        return
    zero = found.values == 0
    if not (np.nan_to_num(found.values) > 0).any() or _is_silenced(chart, length):
        return
    hits = []
    for row in np.flatnonzero(zero.any(axis=1)):
        column = first_run(zero[row], length)
        if column is not None and not is_norm(found.places[row]):
            hits.append(hit_at(found.places[row], found.step(column), 0.0))
    # A loss of differences does not depend on a last bias: alone, it is no sign of anything.
    grave = any(not hit.site.endswith("bias") for hit in hits)
    message = "{site}{also}: exactly zero in each of several steps, so these parameters do not learn"
    evidence = [Evidence("largest gradient", 0.0, hit.site, "absmax", hit.step) for hit in hits[:1]]
    yield from rule.found(hits, message, severity="warning" if grave else "info", evidence=evidence)


def _is_silenced(chart: Chart, length: int) -> bool:
    """Return True if an output is nothing but zeros: then there is no gradient before it, and `dead` says why."""
    silent = chart.grid("zeros", "output", last=length, where=is_whole)
    return bool(silent) and bool((silent.values == 1).all(axis=1).any())


@built_in("only-norms-learn")
def only_norms_learn(rule: Rule, chart: Chart) -> Iterable[Finding]:
    """All is frozen but the layers that normalise, the head too."""
    structure = chart.structure
    parameters = [place for place in chart.places() if place.kind == "param"]
    learning = [place for place in parameters if place.name in structure.trainable]
    frozen = [place for place in parameters if place.name in structure.frozen]
    if not learning or not frozen or not len(chart.steps):
        return
    if all(is_norm(place) for place in learning) and not is_norm(frozen[-1]):
        hits = [hit_at(frozen[-1], int(chart.steps[0]), len(frozen))]
        message = (
            f"only normalisation layers can learn: {len(frozen)} of {len(parameters)} parameters are frozen, "
            "{site} among them"
        )
        evidence = [Evidence("frozen parameters", float(len(frozen)))]
        yield from rule.found(hits, message, evidence=evidence)
