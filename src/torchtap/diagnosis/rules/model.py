"""The model, its loss and its data: hidden modules, broken ties, wrong losses, attention, repeated batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import LOSS, Chart, ChartedSite, Fact, Numbers
from torchtap.diagnosis.finding import Evidence, Finding, Severity
from torchtap.diagnosis.rule_type import (
    LAST,
    Flags,
    Hit,
    Rule,
    built_in,
    detail,
    first_run,
    has_improved,
    hit_at,
    is_weight,
    median_of_columns,
    of_the_model,
    rises_steadily,
)


@built_in("probabilities-as-logits")
def probabilities_as_logits(rule: Rule, chart: Chart, *, length: int = 2) -> Iterable[Finding]:
    """Softmax or sigmoid before a loss that wants logits."""
    facts = chart.facts(rule.name)
    message = "the loss is given probabilities where it wants logits ({site})"
    if facts:
        hits = [Hit(fact.site, fact.step, fact.value) for fact in facts]
        yield from rule.found(hits, f"{message}: {facts[0].text}", severity="error")
        return
    classes = chart.facts("classes")
    if classes:
        yield from rule.found(_sums(chart, classes[0].value, length), message, severity="error")


def _sums(chart: Chart, classes: float, length: int) -> list[Hit]:
    """Outputs between 0 and 1 whose mean is one over the number of classes: each row sums to one."""
    grids = [chart.grid(name, "output", last=LAST, where=of_the_model) for name in ("mean", "min", "max")]
    if not all(grids) or len({grid.values.shape for grid in grids}) > 1:
        return []
    mean, low, high = (grid.values for grid in grids)
    sums = (np.abs(mean * classes - 1) < 1e-4) & (low >= 0) & (high <= 1.001)
    hits = []
    for row, place in enumerate(grids[0].places):
        column = first_run(sums[row], length)
        if column is not None and place.shape and place.shape[-1] == classes:
            hits.append(hit_at(place, grids[0].step(column), float(mean[row, column])))
    return hits


@built_in("sees-the-future")
def sees_the_future(
    rule: Rule,
    chart: Chart,
    *,
    share: float = 1e-06,  # of the attention above the diagonal; a mask leaves exactly nothing
) -> Iterable[Finding]:
    """Attention above the diagonal in a model that is trained on the next token."""
    asked = chart.facts("next-token")
    if not asked:
        return
    measured = chart.facts("attention-above") + chart.facts("future-share")
    seen = [fact for fact in measured if fact.value > share]
    hits = [
        Hit(fact.site, max(fact.step, asked[0].step), fact.value, order) for order, fact in enumerate(seen)
    ]
    evidence = [Evidence("share of attention above the diagonal", hit.value, hit.site) for hit in hits[:1]]
    message = (
        "{site}{also} attends to later tokens ({value:.0%} of its attention), though these are the targets"
    )
    yield from rule.found(hits, message, severity="error", evidence=evidence)


@built_in("loss-maximised")
def loss_maximised(rule: Rule, chart: Chart) -> Iterable[Finding]:
    """Report an error that is made larger."""
    facts, maximises, is_error = (chart.facts(name) for name in (rule.name, "maximises", "error-is-loss"))
    if not facts and maximises and is_error:
        facts = [replace(maximises[0], step=max(maximises[0].step, is_error[0].step))]
    if facts:
        message = "the training makes its error larger ({site})" + detail(facts[0])
        hits = [Hit(fact.site, fact.step, fact.value) for fact in facts]
        yield from rule.found(hits, message, severity="error")


ENTROPY = (
    "attention_entropy"  # the leaf of a value that a probe logs: 1 is even attention, 0 is one position only
)


def is_entropy(place: ChartedSite) -> bool:
    return place.leaf == ENTROPY


@built_in("sharp-attention")
def sharp_attention(
    rule: Rule,
    chart: Chart,
    *,
    entropy: float = 0.6,  # of what even attention has
) -> Iterable[Finding]:
    """A fresh model that attends to single positions."""
    found = chart.grid("value", "value", where=is_entropy)
    if not found or not chart.structure.fresh:
        return
    hits = []
    for row, place in enumerate(found.places):
        seen = np.flatnonzero(~np.isnan(found.values[row]))
        if len(seen) and found.steps[seen[0]] == chart.steps[0] and found.values[row, seen[0]] < entropy:
            hits.append(hit_at(place, found.step(seen[0]), found.values[row, seen[0]]))
    evidence = [
        Evidence("entropy over that of even attention", h.value, h.site, "value", h.step) for h in hits[:1]
    ]
    message = "fresh attention at {site}{also} is sharp: its entropy is {value:.0%} of even attention's"
    yield from rule.found(hits, message, evidence=evidence)


@built_in("attention-collapse")
def attention_collapse(
    rule: Rule, chart: Chart, *, entropy: float = 0.15, was: float = 0.6
) -> Iterable[Finding]:
    """Attention that was spread out and now holds on to single positions everywhere."""
    found = chart.grid("value", "value", where=is_entropy)
    hits: list[Hit] = []
    for row, place in enumerate(found.places) if found else ():
        values = found.values[row]
        seen = np.flatnonzero(~np.isnan(values))
        if len(seen) < 4 or values[seen[0]] < was:
            continue
        column = first_run(values[seen] < entropy, 2)
        if column is not None:
            hits.append(hit_at(place, found.step(seen[column]), values[seen[column]]))
    evidence = [
        Evidence("entropy over that of even attention", h.value, h.site, "value", h.step) for h in hits[:1]
    ]
    message = "attention at {site}{also} has collapsed: its entropy is {value:.0%} of even attention's"
    yield from rule.found(hits, message, evidence=evidence)


@built_in("growing-logits")
def growing_logits(
    rule: Rule,
    chart: Chart,
    *,
    times: float = 10.0,  # its early size
    size: float = 60.0,  # beyond this, the differences that a softmax sees are lost in bfloat16
    window: int = 18,
) -> Iterable[Finding]:
    """The model's answers grow and grow."""
    found = chart.grid("absmax", "output", where=of_the_model)
    if not found or not chart.facts("classes") or found.values.shape[1] < window + 8:
        return
    hits = []
    for row, place in enumerate(found.places):
        values = found.values[row]
        column = _outgrown(values, times, size, window)
        if column is not None and not has_improved(
            chart, found.step(column), 0.95
        ):  # who is right may be sure
            hits.append(hit_at(place, found.step(column), values[column]))
    evidence = [Evidence("largest logit", h.value, h.site, "absmax", h.step) for h in hits[:1]]
    yield from rule.found(hits, "logits at {site}{also} rise steadily, to {value:.3g}", evidence=evidence)


def _outgrown(values: Numbers, times: float, size: float, window: int) -> int | None:
    """Where logits became too large, if they rose steadily until then."""
    early = float(np.nanmedian(values[:8])) if np.isfinite(values[:8]).any() else float("nan")
    column = first_run(values > max(size, times * early), 3)
    if column is None or column < window:
        return None
    return column if rises_steadily(values[column - window + 1 : column + 1]) else None


_PRINT = ("mean", "std", "min", "max", "l1", "l2")  # of two different batches, all of these never agree


@built_in("same-batch")
def same_batch(rule: Rule, chart: Chart, *, length: int = 3) -> Iterable[Finding]:
    """The model's input is the same in each of several steps, bit by bit."""
    grids = [chart.grid(statistic, "input", last=LAST, where=of_the_model) for statistic in _PRINT]
    if not all(grids) or len({grid.values.shape for grid in grids}) > 1 or grids[0].values.shape[1] < 2:
        return
    prints = np.stack([grid.values for grid in grids])  # statistic, site, step
    steps = grids[0].steps
    equal = (prints[:, :, 1:] == prints[:, :, :-1]).all(axis=0)
    varied = prints[1] > 0  # a constant input says nothing
    here = np.isfinite(prints).all(axis=0)
    same = np.concatenate([np.zeros((equal.shape[0], 1), np.bool_), equal], axis=1)
    telling = varied & here
    all_same = np.where(telling, same, True).all(axis=0) & telling.any(axis=0)
    column = first_run(all_same, length - 1)
    if column is None:
        return
    place = grids[0].places[int(np.argmax(telling[:, column]))]
    loader = chart.facts("several-batches")
    severity: Severity = "warning" if loader else "info"
    evidence = [
        Evidence("mean of the input", float(prints[0, 0, column]), place.name, "mean", int(steps[column]))
    ]
    message = "every step is given the same batch ({site})" + (f": {loader[0].text}" if loader else "")
    hits = [hit_at(place, int(steps[column]), float(length))]
    yield from rule.found(hits, message, severity=severity, evidence=evidence)


@built_in("constant-input")
def constant_input(rule: Rule, chart: Chart, *, length: int = 3, elements: int = 16) -> Iterable[Finding]:
    """Everything that the model is given is one and the same number."""
    spread, counts = (
        chart.grid(statistic, "input", last=LAST, where=of_the_model) for statistic in ("std", "count")
    )
    if not spread or spread.values.shape != counts.values.shape:
        return
    large = counts.values >= elements
    empty = np.where(large, spread.values == 0, True).all(axis=0) & large.any(axis=0)
    column = first_run(np.asarray(empty), length)
    if column is None:
        return
    place = spread.places[int(np.argmax(large[:, column]))]
    hits = [hit_at(place, spread.step(column), 0.0)]
    evidence = [Evidence("spread of the input", 0.0, place.name, "std", spread.step(column))]
    message = "every value of the model's input is the same ({site})"
    yield from rule.found(hits, message, severity="error", evidence=evidence)


@built_in("at-chance")
def at_chance(
    rule: Rule,
    chart: Chart,
    *,
    window: int = 80,  # losses
    near: float = 0.05,  # of ln C
    moved: float = 0.05,  # sum of the updates over the weights
) -> Iterable[Finding]:
    """Cross-entropy stays at ln C though the weights move."""
    told = chart.facts("classes")
    steps, loss = chart.losses()
    if not told or len(loss) < window:
        return
    chance = float(np.log(told[0].value))
    flat = _flat(loss, chance, window, near)
    for end in np.flatnonzero(flat):
        last = int(end) + window - 1
        if _moves(chart, int(steps[end]), int(steps[last]), window, moved):
            yield from _say(told[0], int(steps[last]), float(loss[end : last + 1].mean()), chance, rule)
            return


def _flat(loss: Numbers, chance: float, steps: int, near: float) -> Flags:
    """Of each window of losses, whether it stays at chance and does not fall."""
    half = steps // 2
    windows = np.lib.stride_tricks.sliding_window_view(loss, steps)
    early, late = windows[:, :half].mean(axis=1), windows[:, half:].mean(axis=1)
    noise = windows.std(axis=1) * np.sqrt(4.0 / steps)
    at_chance = np.abs(windows.mean(axis=1) - chance) <= near * chance
    falls = early - late > np.maximum(2 * noise, 0.004 * chance)
    return np.asarray(at_chance & ~falls & (late >= 0.97 * chance), np.bool_)


def _moves(chart: Chart, begin: int, end: int, steps: int, moved: float) -> bool:
    ratios = chart.grid("ratio", "update", where=is_weight)
    if not ratios:
        return False
    within = (ratios.steps >= begin) & (ratios.steps <= end)
    middle = median_of_columns(ratios.values[:, within])
    middle = middle[np.isfinite(middle)]
    return bool(len(middle)) and float(middle.mean()) * steps > moved


def _say(told: Fact, step: int, loss: float, chance: float, rule: Rule) -> Iterable[Finding]:
    evidence = [Evidence("loss", loss, LOSS, "value", step), Evidence("loss of guessing, ln C", chance)]
    message = f"the loss stays at {loss:.3g}, as guessing one of {told.value:.0f} would have it ({{site}})"
    yield from rule.found([Hit(told.site, step, loss)], message, evidence=evidence)


@built_in("window-scale")
def window_scale(
    rule: Rule,
    chart: Chart,
    *,
    slack: float = 0.45,  # of the way from the proportion to one
    windows: int = 2,  # short ones that were recorded
) -> Iterable[Finding]:
    """Gradients in proportion to the number of micro-batches of their step."""
    passes = chart.passes
    full = int(passes.max()) if len(passes) else 0
    if full < 2:
        return
    found = chart.grid("l2", "param_grad")
    if not found:
        return
    norms = np.sqrt(np.nansum(found.values**2, axis=0))
    columns = _short(passes, norms, full)
    if len(columns) < windows:
        return
    ratios = np.array([norms[at] / _around(norms, passes == full, at) for at in columns])
    expected = np.array([passes[at] / full for at in columns])
    # In proportion, not gone: a training that has converged has no gradient in any window.
    small = (ratios <= expected + slack * (1 - expected)) & (ratios > 0.5 * expected)
    # Decided by the first windows alone, so that later ones change nothing.
    if not small[:windows].all() or (expected[:windows] > 0.67).any():
        return
    at = columns[windows - 1]
    step = int(chart.steps[at])
    place = found.places[0]
    evidence = [
        Evidence(
            "gradient of a short window over that of a full one", float(ratios[0]), place.name, "l2", step
        ),
        Evidence("micro-batches of the short window over the full one", float(expected[0])),
    ]
    message = (
        f"gradients go with the number of micro-batches: {passes[at]} instead of {full} give "
        "{value:.2f} of the gradient ({site})"
    )
    yield from rule.found([hit_at(place, step, float(ratios[0]))], message, evidence=evidence)


def _short(passes: npt.NDArray[np.int64], norms: Numbers, full: int) -> list[int]:
    there = (passes > 0) & (norms > 0) & np.isfinite(norms)
    return [int(at) for at in np.flatnonzero(there & (passes < full)) if at > 0]


def _around(norms: Numbers, full: Flags, at: int) -> float:
    """The usual norm of the full windows next to a short one, those before it."""
    near = np.flatnonzero(full[:at])[-4:]
    return float(np.median(norms[near])) if len(near) else float("nan")
