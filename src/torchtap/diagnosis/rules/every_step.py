"""Rules over the pulse: every update of a training, explained by the optimizer's own arithmetic.

A slot is one parameter whose gradient, weight, update and moments are sampled at each update: one for each group of an
optimizer, and one in turn. Each sentence of a finding is a comparison of these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from torchtap.diagnosis.chart import LOSS, Chart, Numbers
from torchtap.diagnosis.finding import Evidence, Finding
from torchtap.diagnosis.rule_type import (
    Flags,
    Hit,
    Rule,
    built_in,
    first_run,
    first_run_of,
)

_ROUNDING = 2.0**-7  # of a weight: bfloat16 loses a smaller update


def _slots(chart: Chart) -> list[str]:
    """Return the slots of the pulse: ``0.0``, ``0.1``, ``0.r``."""
    return [name.removesuffix(".grad") for name in chart.pulse.names() if name.endswith(".grad")]


def _row(chart: Chart, name: str) -> Numbers:
    found = chart.pulse.row(name)
    return np.full(len(chart.pulse.steps), np.nan) if found is None else found


def _filled(chart: Chart, name: str) -> Numbers:
    """Return a hyper-parameter at every step: it is noted when it changes."""
    values = _row(chart, name).copy()
    known = np.flatnonzero(~np.isnan(values))
    if len(known):
        values = values[known[np.clip(np.searchsorted(known, np.arange(len(values)), "right") - 1, 0, None)]]
    return values


def _rate(chart: Chart, slot: str) -> Numbers:
    """Return the learning rate of a slot; the largest of all groups for the parameter in turn."""
    optimizer, _, group = slot.partition(".")
    if group != "r":
        return _row(chart, f"{slot}.lr")
    rows = [
        _row(chart, name) for name in chart.pulse.names() if name.endswith(".lr") and name[0] == optimizer
    ]
    return np.asarray(np.nan_to_num(rows, nan=-1.0).max(axis=0), np.float64) if rows else _row(chart, "")


def _site(chart: Chart, slot: str, column: int) -> str:
    """Return the site of the parameter in a slot."""
    number = _row(chart, f"{slot}.which")[column]
    known = np.isfinite(number) and 0 <= number < len(chart.parameters)
    return chart.parameters[int(number)] if known else ":output"


def _skipped(chart: Chart, slot: str) -> Flags:
    return np.asarray(np.nan_to_num(_row(chart, f"{slot[0]}.skipped")) > 0, np.bool_)


def _alone(chart: Chart) -> bool:
    """Return True if one optimizer trains: no other plays against it."""
    return not any(name.endswith(".loss") and not name.startswith("0.") for name in chart.pulse.names())


def _medians(values: Numbers, length: int) -> Numbers:
    """Return the median of each window of finite numbers, at its end; NaN before the first whole one."""
    out = np.full(len(values), np.nan)
    if len(values) >= length:
        with np.errstate(invalid="ignore"):
            out[length - 1 :] = np.median(np.lib.stride_tricks.sliding_window_view(values, length), axis=1)
    return out


@built_in("update-zero")
def update_zero(rule: Rule, chart: Chart, *, length: int = 3) -> Iterable[Finding]:
    """Report slots that do not move though the arithmetic says they should."""
    hits: list[Hit] = []
    evidence: list[Evidence] = []
    words = ""
    for slot in _slots(chart):
        moved, gradient, rate = _row(chart, f"{slot}.moved"), _row(chart, f"{slot}.grad"), _rate(chart, slot)
        weight, predicted = _row(chart, f"{slot}.weight"), _row(chart, f"{slot}.predicted")
        meant = np.where(np.isnan(predicted), rate * gradient, predicted)
        with np.errstate(invalid="ignore"):
            still = (moved == 0) & (gradient > 0) & (rate > 0) & (meant > _ROUNDING * weight * 1e-2)
        still &= ~_skipped(chart, slot)
        column = first_run_of(np.asarray(still), ~np.isnan(moved), length)
        if column is not None:
            hits.append(
                Hit(_site(chart, slot, column), int(chart.pulse.steps[column]), float(gradient[column]))
            )
            if not evidence:
                words = f": learning rate {rate[column]:.3g}, gradient {gradient[column]:.3g} (rms), update 0"
                evidence = [
                    Evidence("learning rate", float(rate[column]), step=hits[0].step),
                    Evidence("gradient, rms of a sample", float(gradient[column]), step=hits[0].step),
                    Evidence("update, rms of a sample", 0.0, step=hits[0].step),
                ]
    yield from rule.found(hits, "{site}{also} does not change" + words, severity="error", evidence=evidence)


@built_in("update-unexplained")
def update_unexplained(rule: Rule, chart: Chart, *, share: float = 0.2, length: int = 4) -> Iterable[Finding]:
    """Report updates that the arithmetic of SGD, Adam and AdamW does not give."""
    for slot in _slots(chart):
        if slot.endswith("r"):
            continue
        left, update = _row(chart, f"{slot}.unexplained"), _row(chart, f"{slot}.update")
        predicted, weight = _row(chart, f"{slot}.predicted"), _row(chart, f"{slot}.weight")
        with np.errstate(invalid="ignore"):
            odd = (left > share * np.maximum(update, predicted)) & (left > 1e-5 * weight) & (update > 0)
        column = first_run_of(np.asarray(odd & ~_skipped(chart, slot)), ~np.isnan(left), length)
        if column is not None:
            step = int(chart.pulse.steps[column])
            evidence = [
                Evidence("update, rms of a sample", float(update[column]), step=step),
                Evidence("update by the optimizer's arithmetic", float(predicted[column]), step=step),
            ]
            message = (
                f"{{site}} changes by {update[column]:.3g} a step (rms), its optimizer's arithmetic gives "
                f"{predicted[column]:.3g}"
            )
            hits = [Hit(_site(chart, slot, column), step, float(left[column]))]
            yield from rule.found(hits, message, evidence=evidence)
            return


@built_in("changed-outside")
def changed_outside(rule: Rule, chart: Chart, *, share: float = 0.5) -> Iterable[Finding]:
    """Report a jump of a weight between its updates."""
    for slot in _slots(chart):
        outside, weight = _row(chart, f"{slot}.outside"), _row(chart, f"{slot}.weight")
        update = _row(chart, f"{slot}.update")
        with np.errstate(invalid="ignore"):
            jumps = np.flatnonzero((outside > share * weight) & (outside > 10 * update))
        if len(jumps):
            step = int(chart.pulse.steps[jumps[0]])
            message = (
                f"{{site}} changes by {outside[jumps[0]]:.3g} (rms) between two updates; its size is "
                f"{weight[jumps[0]]:.3g}"
            )
            evidence = [Evidence("change outside of the update", float(outside[jumps[0]]), step=step)]
            yield from rule.found(
                [Hit(_site(chart, slot, jumps[0]), step, float(outside[jumps[0]]))],
                message,
                evidence=evidence,
            )
            return


@built_in("rate-zero")
def rate_zero(
    rule: Rule, chart: Chart, *, length: int = 8, share: float = 1e-4, part: float = 0.1
) -> Iterable[Finding]:
    """Report a learning rate that is gone, from the step at which it is certain."""
    steps = chart.pulse.steps
    hits, evidence = [], []
    for name in chart.pulse.names():
        if not name.endswith(".lr"):
            continue
        slot = name.removesuffix(".lr")
        rate = _filled(chart, name)
        gradient = _row(chart, f"{slot}.grad")
        most = np.maximum.accumulate(np.nan_to_num(rate))
        alive = np.nan_to_num(gradient, nan=1.0) > 0
        column = first_run((rate == 0) & alive, length)
        small = (rate <= share * most) & (most > 0) & alive
        # A schedule may end near zero: only a long stay there is a fault.
        run = np.zeros(len(rate), np.int64)
        for at in range(len(rate)):
            run[at] = run[at - 1] + 1 if small[at] and at else int(small[at])
        late = np.flatnonzero(run >= np.maximum(24, part * (steps - steps[:1] + 1)))
        ends = [at for at in (column, int(late[0]) if len(late) else None) if at is not None]
        if ends:
            at = min(ends)
            hits.append(Hit(_site(chart, slot, at), int(steps[at]), float(rate[at])))
            evidence.append(
                Evidence(
                    f"learning rate of group {slot.removeprefix('0.')}", float(rate[at]), step=int(steps[at])
                )
            )
            evidence.append(Evidence("largest learning rate so far", float(most[at])))
    if hits:
        message = (
            "the learning rate is {value:.3g} for many steps, while gradients are not zero ({site}{also})"
        )
        yield from rule.found(hits, message, evidence=evidence[:4])


@built_in("moments-reset")
def moments_reset(rule: Rule, chart: Chart, *, least: int = 5) -> Iterable[Finding]:
    """Report a count of updates that falls, or momentum that is one gradient again."""
    steps = chart.pulse.steps
    for slot in _slots(chart):
        if slot.endswith("r"):
            continue
        age = _row(chart, f"{slot}.age")
        known = np.flatnonzero(~np.isnan(age))
        falls = known[1:][(age[known[1:]] <= 1) & (age[known[:-1]] >= least)]
        if len(falls):
            at, before = int(falls[0]), float(age[known[known < falls[0]][-1]])
            message = (
                f"the optimizer counts {age[at]:.0f} update of {{site}} at step {{step}}, after {before:.0f} before: "
                "its moments begin anew"
            )
            evidence = [Evidence("updates that the state counts", float(age[at]), step=int(steps[at]))]
            yield from rule.found(
                [Hit(_site(chart, slot, at), int(steps[at]), before)], message, evidence=evidence
            )
            return
        if len(known):
            continue
        moment, gradient = _row(chart, f"{slot}.moment"), _row(chart, f"{slot}.grad")
        with np.errstate(invalid="ignore", divide="ignore"):
            usual = np.nanmedian(gradient[:-1]) if len(gradient) > 1 else np.nan
            single = (np.abs(moment / gradient - 1) < 1e-6) & (gradient < 10 * usual)
        seen = np.flatnonzero(~np.isnan(moment))
        begins = [
            int(at)
            for at in np.flatnonzero(single)
            if (seen < at).sum() >= least and not single[seen[seen < at]][-least:].any()
        ]
        if begins:
            at = begins[0]
            before = float(moment[seen[seen < at][-1]])
            message = (
                f"the momentum of {{site}} is its gradient alone at step {{step}} ({moment[at]:.3g}), after "
                f"{before:.3g} before: it begins anew"
            )
            yield from rule.found([Hit(_site(chart, slot, at), int(steps[at]), float(moment[at]))], message)
            return


@built_in("odd-hyper-parameters")
def odd_hyper_parameters(rule: Rule, chart: Chart, *, updates: int = 8) -> Iterable[Finding]:
    """Report eps above the gradients' size, swapped betas, momentum of one, decay that removes the weights."""
    steps = chart.pulse.steps
    if len(steps) < updates:
        return
    at = updates - 1
    for slot in (each for each in _slots(chart) if not each.endswith("r")):
        for value, text in _odd(chart, slot, at):
            evidence = [Evidence("value", value, step=int(steps[at]))]
            yield from rule.found(
                [Hit(_site(chart, slot, at), int(steps[at]), value)], text + " ({site})", evidence=evidence
            )
            return


def _odd(chart: Chart, slot: str, at: int) -> Iterator[tuple[float, str]]:
    """Yield the odd hyper-parameters of a group, each with a sentence."""
    eps, second = _filled(chart, f"{slot}.eps")[at], _row(chart, f"{slot}.second")[at]
    size = np.sqrt(second) if second > 0 else np.nan
    if eps >= 1e-4 and eps > 3 * size:
        yield (
            float(eps),
            f"eps is {eps:.3g}, {eps / size:.3g} times the size of the gradients ({size:.3g}), which it is added to",
        )
    first, other = _filled(chart, f"{slot}.betas")[at], _filled(chart, f"{slot}.betas1")[at]
    if first > other:
        yield float(first), f"betas are ({first:g}, {other:g}): the first is above the second"
    momentum = _filled(chart, f"{slot}.momentum")[at]
    if momentum >= 0.9995:
        yield (
            float(momentum),
            f"momentum is {momentum:g}: gradients add up over {1 / max(1e-9, 1 - momentum):.0f} steps and more",
        )
    decay, rate = _filled(chart, f"{slot}.weight_decay")[at], _rate(chart, slot)[at]
    weight, gradient = _row(chart, f"{slot}.weight")[at], _row(chart, f"{slot}.grad")[at]
    apart = np.isfinite(second)
    if apart and decay * rate >= 0.02:
        yield (
            float(decay),
            f"weight decay {decay:g} times the learning rate {rate:.3g} removes {decay * rate:.1%} a step",
        )
    if not apart and decay >= 0.05 and decay * weight > 5 * gradient:
        yield (
            float(decay),
            f"weight decay {decay:g} is {decay * weight / max(gradient, 1e-30):.3g} times the gradient of the loss",
        )


@built_in("clipped-away")
def clipped_away(rule: Rule, chart: Chart, *, factor: float = 0.01, length: int = 10) -> Iterable[Finding]:
    """Report clip factors near zero."""
    clip = _row(chart, "0.clip")
    with np.errstate(invalid="ignore"):
        column = first_run_of(np.asarray(clip < factor), ~np.isnan(clip), length)
    if column is None:
        return
    step = int(chart.pulse.steps[column])
    adaptive = np.isfinite(_row(chart, "0.0.second")).any()
    middle = float(np.nanmedian(clip[: column + 1][-length:]))
    message = f"gradients are clipped to {middle:.2g} of their size in each of {length} steps ({{site}})"
    if adaptive:
        message += "; this optimizer divides by their size, so its updates hardly feel it"
    evidence = [Evidence("size after clipping over before", middle, step=step)]
    hits = [Hit(_site(chart, "0.0", column), step, middle)]
    yield from rule.found(hits, message, severity="info" if adaptive else "warning", evidence=evidence)


@built_in("loss-diverged")
def loss_diverged(
    rule: Rule, chart: Chart, *, times: float = 1.5, length: int = 16, ratio: float = 0.03
) -> Iterable[Finding]:
    """Report a loss that is and stays above its beginning, if updates are large, or it is a cross-entropy."""
    loss = _row(chart, "0.loss")
    if not _alone(chart) or np.isfinite(loss).sum() < length + 4:
        return
    known = np.flatnonzero(np.isfinite(loss))
    first = float(np.median(loss[known[:4]]))
    if first <= 0:
        return
    low = np.full(len(loss), -np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(loss[known], length)
    low[known[length - 1 :]] = windows.min(axis=1)
    high = low > times * first
    steps_large = np.zeros(len(loss), np.bool_)
    shares = []
    for slot in _slots(chart):
        with np.errstate(invalid="ignore", divide="ignore"):
            shares.append(_medians(_row(chart, f"{slot}.update") / _row(chart, f"{slot}.weight"), length))
    for share in shares:
        steps_large |= np.nan_to_num(share) > ratio
    classes = chart.facts("classes")
    entropy = bool(classes) and abs(first - np.log(classes[0].value)) < 0.5 * np.log(classes[0].value)
    certain = high & (steps_large | entropy | (low > 1e3 * first))
    ends = np.flatnonzero(certain)
    if not len(ends):
        return
    at = int(ends[0])
    step = int(chart.pulse.steps[at])
    largest = max((float(each[at]) for each in shares if np.isfinite(each[at])), default=0.0)
    message = f"the loss is above {low[at]:.3g} in each of {length} steps; it began at {first:.3g}"
    if largest > ratio:
        message += f", and updates change weights by {largest:.0%} a step"
    evidence = [Evidence("loss", float(loss[at]), LOSS, "value", step), Evidence("first loss", first, LOSS)]
    yield from rule.found([Hit(LOSS, step, float(loss[at]))], message, severity="error", evidence=evidence)


@built_in("loss-spike")
def loss_spike(rule: Rule, chart: Chart, *, times: float = 30.0, history: int = 16) -> Iterable[Finding]:
    """Report a loss far beyond its own history."""
    steps, loss = chart.pulse.steps, _row(chart, "0.loss")
    if not _alone(chart) or len(loss) <= history:
        return
    for at in range(history, len(loss)):
        before = loss[at - history : at]
        if not (before > 0).all():
            continue  # a loss of both signs has no usual size
        with np.errstate(invalid="ignore"):
            usual, most = float(np.median(np.abs(before))), float(np.max(np.abs(before)))
        if (
            np.isfinite(loss[at])
            and usual > 1e-6
            and loss[at] > max(times * usual, 5 * most)
            and loss[at] > 0.1
        ):
            evidence = [
                Evidence("loss", float(loss[at]), LOSS, "value", int(steps[at])),
                Evidence("usual loss", usual),
            ]
            message = f"the loss is {loss[at]:.4g} at step {{step}}, {loss[at] / usual:.0f} times its usual {usual:.3g}"
            yield from rule.found([Hit(LOSS, int(steps[at]), float(loss[at]))], message, evidence=evidence)
            return


@built_in("first-loss")
def first_loss(rule: Rule, chart: Chart, *, times: float = 5.0) -> Iterable[Finding]:
    """Compare the first loss with ln(classes)."""
    classes, loss = chart.facts("classes"), _row(chart, "0.loss")
    if not classes or not len(loss) or not chart.structure.fresh or not np.isfinite(loss[0]):
        return
    guessing = float(np.log(classes[0].value))
    if loss[0] > times * guessing:
        step = max(int(chart.pulse.steps[0]), classes[0].step)
        message = f"the first loss is {loss[0]:.3g}; guessing among {classes[0].value:.0f} classes has {guessing:.3g}"
        evidence = [
            Evidence("first loss", float(loss[0]), LOSS, "value", int(chart.pulse.steps[0])),
            Evidence("loss of guessing", guessing),
        ]
        yield from rule.found([Hit(LOSS, step, float(loss[0]))], message, evidence=evidence)


@built_in("repeated-batch")
def repeated_batch(rule: Rule, chart: Chart, *, length: int = 6) -> Iterable[Finding]:
    """Report inputs that repeat after they had changed from step to step."""
    steps, given = chart.pulse.steps, _row(chart, "input")
    same = np.zeros(len(given), np.bool_)
    same[1:] = (given[1:] == given[:-1]) & (given[1:] != 0)
    column = first_run_of(same, ~np.isnan(given), length)
    if column is None:
        return
    begin = column - length + 1
    changed = np.flatnonzero(~np.isnan(given[:begin]))
    if len(np.unique(given[changed])) < max(3, len(changed) // 2):
        return  # batches never were different
    target = _row(chart, "target")
    also = (
        " with the same targets"
        if len(set(target[begin : column + 1].tolist())) == 1 and np.isfinite(target[column])
        else ""
    )
    message = f"the same batch is used at each of {length} steps up to step {{step}}{also} ({{site}})"
    yield from rule.found([Hit(":input", int(steps[column]), float(length))], message)


@built_in("same-targets")
def same_targets(rule: Rule, chart: Chart, *, length: int = 12) -> Iterable[Finding]:
    """Report targets that repeat while inputs change."""
    given, target = _row(chart, "input"), _row(chart, "target")
    if not _alone(chart):
        return
    same = np.zeros(len(given), np.bool_)
    same[1:] = (target[1:] == target[:-1]) & (given[1:] != given[:-1]) & (target[1:] != 0)
    column = first_run_of(same, ~np.isnan(target) & ~np.isnan(given), length)
    if column is not None:
        message = f"the targets are the same at each of {length} steps, though the inputs differ ({{site}})"
        yield from rule.found(
            [Hit(":input", int(chart.pulse.steps[column]), float(length))], message, severity="info"
        )
