"""Values: dead units, saturated or constant outputs, sizes that grow or fade over depth or steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from torchtap.diagnosis.chart import EARLY, Chart, ChartedSite, ChartGrid, Numbers
from torchtap.diagnosis.finding import Evidence, Finding, Severity
from torchtap.diagnosis.rule_type import (
    LAST,
    Hit,
    Rule,
    built_in,
    first_run,
    has_improved,
    hit_at,
    is_layer,
    is_layer_weight,
    is_main_layer,
    is_main_weight,
    is_whole,
    of_the_model,
)
from torchtap.plan.names import site_name


@built_in("dead-units")
def dead_units(
    rule: Rule,
    chart: Chart,
    *,
    share: float = 0.4,  # of a layer's units
    length: int = 3,  # records in a row
    samples: int = 32,  # values of a unit in a step; with fewer, silence is chance
    often: float = 0.6,  # of the samples fire the others; more, and what they see hardly changes
) -> Iterable[Finding]:
    """Report units that never fire, measured at the activation; without one, units without a gradient."""
    measured = chart.grid("dead_share", "output", last=LAST, where=is_whole).recorded()
    fires = bool(measured)
    found = (
        measured
        if fires
        else chart.grid("dead_share", "param_grad", last=LAST, where=is_layer_weight).recorded()
    )
    off = _medians_of_zeros(chart, "output" if fires else "grad_output")
    counts, before = _samples(chart), _layer_before(chart)
    hits = []
    for row in np.flatnonzero((found.values >= share).any(axis=1)):
        place = found.places[row]
        column = first_run(found.values[row] >= share, length)
        if column is None or counts.get(place.module, samples) < samples or _is_frozen(chart, place):
            continue
        dead = float(found.values[row, column])
        zeros = off.get(place.module, 1.0)
        if dead == 1 or 1 - (zeros - dead) / (1 - dead) <= often:
            site = before.get(place.module, place.name) if fires else place.name
            hits.append(Hit(site, found.step(column), dead, place.index))
    word = (
        f"fire for no sample of {length} records"
        if fires
        else f"get no gradient from any sample of {length} records"
    )
    evidence = [Evidence("share of dead units", h.value, h.site, "dead_share", h.step) for h in hits[:1]]
    yield from rule.found(hits, "{value:.0%} of the units of {site}{also} " + word, evidence=evidence)


def _is_frozen(chart: Chart, place: ChartedSite) -> bool:
    return (
        place.kind == "param_grad" and site_name(place.module, "param", place.leaf) in chart.structure.frozen
    )


def _layer_before(chart: Chart) -> dict[str, str]:
    """Return the weight of the layer that runs before each other module."""
    found, last = {}, ""
    for place in chart.places():
        if place.kind == "output" and is_layer(place):
            last = site_name(place.module, "param", "weight")
        elif place.kind == "output" and last and chart.has_come(last):
            found[place.module] = last
    return found


def _medians_of_zeros(chart: Chart, kind: str) -> dict[str, float]:
    """Return the usual share of zeros of each module's output, or of the gradient of its output."""
    found = chart.grid("zeros", kind, last=LAST, where=is_whole)
    return {
        place.module: float(np.median(seen))
        for place, row in zip(found.places, found.values, strict=True)
        if len(seen := row[~np.isnan(row)])
    }


def _samples(chart: Chart) -> dict[str, float]:
    """How many values a unit of each module has in a step."""
    found: dict[str, float] = {}
    for place in chart.places():
        if place.kind == "output" and place.shape and len(place.shape) >= 2:
            units = place.shape[1] if "Conv" in place.module_class else place.shape[-1]
            found[place.module] = float(np.prod(place.shape)) / max(1, units)
    return found


@built_in("dead")
def dead(rule: Rule, chart: Chart, *, share: float = 0.99, length: int = 5) -> Iterable[Finding]:
    """An output that is nearly all zero."""
    found = chart.grid("zeros", "output", last=LAST, where=is_whole)
    hits = []
    for row in np.flatnonzero((found.values >= share).any(axis=1)) if found else ():
        column = first_run(found.values[row] >= share, length)
        if column is not None:
            hits.append(hit_at(found.places[row], found.step(column), found.values[row, column]))
    message = "{value:.0%} of the values of {site}{also} are exactly zero"
    grades: dict[Severity, list[Hit]] = {
        "error": [each for each in hits if each.value == 1],  # nothing at all comes out
        "warning": [each for each in hits if each.value < 1],
    }
    for severity, some in grades.items():
        evidence = [Evidence("share of zeros", h.value, h.site, "zeros", h.step) for h in some[:1]]
        yield from rule.found(some, message, severity=severity, evidence=evidence)


@built_in("constant")
def constant(rule: Rule, chart: Chart, *, length: int = 3) -> Iterable[Finding]:
    """An output of many values that are all the same number, though not zero."""
    spread, sizes = (
        chart.grid("std", "output", last=LAST, where=is_whole),
        chart.grid("absmax", "output", last=LAST, where=is_whole),
    )
    counts = chart.grid("count", "output", last=LAST, where=is_whole)
    if not spread or spread.values.shape != sizes.values.shape or spread.values.shape != counts.values.shape:
        return
    same = (spread.values == 0) & (sizes.values > 0) & (counts.values >= 16)
    hits = []
    for row in np.flatnonzero(same.any(axis=1)):
        column = first_run(same[row], length)
        if column is not None:
            hits.append(hit_at(spread.places[row], spread.step(column), sizes.values[row, column]))
    yield from rule.found(hits, "every value of {site}{also} is the same number, {value:.3g}")


@built_in("collapsed")
def collapsed(
    rule: Rule,
    chart: Chart,
    *,
    share: float = 1e-06,  # of the outputs' mean square that differs between samples
    length: int = 3,
) -> Iterable[Finding]:
    """The model answers the same to every sample, though the samples differ."""
    answers = chart.grid("between", "output", last=LAST)
    questions = chart.grid("between", "input", last=LAST)
    if not answers or not questions:
        return
    differ = (np.nan_to_num(questions.values) > 1e-4).any(axis=0)
    hits = []
    for row, place in enumerate(answers.places):
        column = first_run((answers.values[row] <= share) & differ, length)
        if column is not None:
            hits.append(hit_at(place, answers.step(column), answers.values[row, column]))
    message = "{site}{also} is the same for every sample, though the inputs differ"
    evidence = [
        Evidence("share that differs between samples", h.value, h.site, "between", h.step) for h in hits[:1]
    ]
    yield from rule.found(hits, message, evidence=evidence)


@built_in("saturated")
def saturated(
    rule: Rule,
    chart: Chart,
    *,
    tanh: float = 0.05,  # mean of 1 - x²
    sigmoid: float = 0.02,  # mean of x(1 - x)
    length: int = 3,
) -> Iterable[Finding]:
    """Hidden tanh and sigmoid layers that sit at the ends of their range."""
    sizes, means = chart.grid("rms", "output", last=LAST), chart.grid("mean", "output", last=LAST)
    if not sizes or sizes.values.shape != means.values.shape:
        return
    # What comes after the last layer is the model's answer, and may be sure of itself.
    layers = [place.index for place in sizes.places if is_layer(place)]
    hits = []
    for place, size, mean in zip(sizes.places, sizes.values, means.values, strict=True):
        room = _room(place, size, mean, tanh, sigmoid)
        if room is None or not layers or place.index > layers[-1]:
            continue
        left, limit = room
        column = first_run(left <= limit, length)
        if column is not None:
            hits.append(hit_at(place, sizes.step(column), left[column]))
    evidence = [Evidence("room that is left, on average", h.value, h.site, "rms", h.step) for h in hits[:1]]
    message = "{site}{also} is saturated: nearly every value sits at the end of its range"
    yield from rule.found(hits, message, evidence=evidence)


def _room(
    place: ChartedSite, size: Numbers, mean: Numbers, tanh: float, sigmoid: float
) -> tuple[Numbers, float] | None:
    """How far values are from the ends of their range on average, and the limit; None of what has no such range."""
    if place.module_class == "Tanh":
        return 1 - size**2, tanh
    if place.module_class == "Sigmoid":
        return mean - size**2, sigmoid
    return None


@built_in("exploding")
def exploding(rule: Rule, chart: Chart, *, times: float = 100.0, length: int = 3) -> Iterable[Finding]:
    """A size far beyond what it was in the first steps, and not on its way back."""
    hits: list[Hit] = []
    for kind in ("output", "grad_output", "param_grad"):
        found = chart.grid("rms", kind).recorded()
        if found and found.values.shape[1] >= 8:
            hits += _grown(chart, found, times, length)
    evidence = [Evidence("times its early size", h.value, h.site, "rms", h.step) for h in hits[:1]]
    message = "{site}{also} grew to {value:.3g} times its early size, by step {step}"
    yield from rule.found(hits, message, evidence=evidence)


def _grown(chart: Chart, found: ChartGrid, times: float, length: int) -> Iterator[Hit]:
    """The places of one kind that grew for long enough, and lately."""
    base = _base_sizes(found.values)
    begin = max(8, found.values.shape[1] - LAST)
    over = found.values[:, begin:] > times * base[:, None]
    for row in np.flatnonzero(over.any(axis=1)):
        column = first_run(over[row], length)
        if column is None or base[row] <= 0:
            continue
        at = begin + column
        # Answers grow where a model becomes sure of what it has learned, gradients where a branch awakes.
        if not has_improved(chart, found.step(at)):
            yield hit_at(found.places[row], found.step(at), found.values[row, at] / base[row])


def _base_sizes(values: Numbers) -> Numbers:
    """What growth is measured by: what is tiny beside its kind at the start grows without harm."""
    early = _early_sizes(values)
    usual = np.nanmedian(early[early > 0]) if (early > 0).any() else np.nan
    return np.maximum(early, usual)


def _early_sizes(values: Numbers) -> Numbers:
    """The largest size in the first eight records: a start from zero is no start."""
    first = np.nan_to_num(values[:, :8], posinf=0.0)
    return np.asarray(first.max(axis=1), np.float64)


@built_in("vanishing")
def vanishing(
    rule: Rule,
    chart: Chart,
    *,
    total: float = 0.0001,  # of the gradient at the last layer is left at the first
    layers: int = 4,
    length: int = 2,
) -> Iterable[Finding]:
    """Gradients that shrink from layer to layer by about the same factor."""
    found = chart.grid("rms", "grad_output", where=is_main_layer).recorded()
    if len(found.places) < layers or not found:
        return
    columns = np.array(
        [_fades(found.values[:, at], total) for at in range(min(found.values.shape[1], EARLY))]
    )
    column = first_run(columns, length)
    if column is None:
        return
    sizes = found.values[:, column]
    left = sizes[0] / sizes[-1]
    hits = [
        hit_at(place, found.step(column), size / sizes[-1])
        for place, size in zip(found.places, sizes, strict=True)
        if size < sizes[-1] * total**0.5
    ]
    evidence = [Evidence("gradient left of the last layer's", float(left), hits[0].site, "rms", hits[0].step)]
    message = "gradients vanish on their way back: {site}{also} gets {value:.1e} of the last layer's"
    yield from rule.found(hits, message, evidence=evidence)


def _fades(sizes: Numbers, total: float) -> bool:
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        return False
    logs = np.log(sizes)
    if logs[0] - logs[-1] > np.log(total):
        return False
    # Layer by layer, not at one place: most of the way leads down.
    return bool((np.diff(logs) > 0).mean() >= 0.75)


@built_in("fading")
def fading(rule: Rule, chart: Chart, *, share: float = 1e-05, length: int = 5) -> Iterable[Finding]:
    """A gradient far below what it was in the first steps, while others of its kind are not."""
    found = chart.grid("rms", "grad_output", where=is_main_layer).recorded()
    if not found or found.values.shape[1] < 16 or len(found.places) < 2:
        return
    early = np.median(np.nan_to_num(found.values[:, :8]), axis=1)
    recent = slice(max(8, found.values.shape[1] - LAST), None)
    with np.errstate(invalid="ignore", divide="ignore"):
        left = found.values[:, recent] / early[:, None]
    going_on = np.where(np.isfinite(left), left, 0.0).max(axis=0) > 1e-2
    hits = []
    for row, place in enumerate(found.places):
        gone = (left[row] < share) & (found.values[row, recent] > 0) & going_on
        column = first_run(gone, length)
        if column is not None and early[row] > 0:
            hits.append(hit_at(place, found.step(column + (recent.start or 0)), left[row, column]))
    evidence = [Evidence("left of its early gradient", h.value, h.site, "rms", h.step) for h in hits[:1]]
    yield from rule.found(
        hits, "the gradient at {site}{also} faded to {value:.1e} of what it was", evidence=evidence
    )


@built_in("shrinking")
def shrinking(
    rule: Rule,
    chart: Chart,
    *,
    share: float = 0.5,
    within: int = 60,  # steps
    length: int = 2,  # records in a row
) -> Iterable[Finding]:
    """Weights that lose half of their size within a few dozen steps, most of them alike."""
    found = chart.grid("rms", "param", where=is_main_weight)
    columns = np.flatnonzero(~np.isnan(found.values).all(axis=0)) if found else np.zeros(0, np.int64)
    if len(columns) <= length:
        return
    sizes, steps = found.values[:, columns], found.steps[columns]
    for at in range(max(length, len(columns) - LAST), len(columns)):
        before = int(np.searchsorted(steps, steps[at] - within))
        left = sizes[:, at - length + 1 : at + 1] / np.maximum(sizes[:, before, None], 1e-30)
        # All but a few: what a loss makes smaller it does not make smaller everywhere.
        if at - before >= length and ((left < share).mean(axis=0) >= 0.9).all():
            at_step = int(steps[at])
            hits = [hit_at(place, at_step, left[row, -1]) for row, place in enumerate(found.places)]
            evidence = [Evidence("left of the weight", h.value, h.site, "rms", h.step) for h in hits[:1]]
            message = "weights shrink everywhere: {value:.0%} is left of {site}{also}"
            yield from rule.found(hits, message, evidence=evidence)
            return


@built_in("init-too-large")
def init_too_large(
    rule: Rule,
    chart: Chart,
    *,
    gain: float = 4.0,  # of a layer, by rms; He's initialisation has 1.4
    layers: int = 2,
    answer: float = 20.0,  # size of the output that one such layer alone is judged by
) -> Iterable[Finding]:
    """Fresh layers that each make their input several times larger."""
    if not chart.structure.fresh or not len(chart.steps):
        return
    grown = _init_too_large_grown(chart, gain)
    answer = _answer(chart)
    if len(grown) < (1 if answer > answer else layers):
        return
    # Where norms follow, the size of weights does not matter: values have to have grown.
    if answer <= answer / 2 and max(size for _, _, size in grown) < 1.5 * gain:
        return
    step = int(chart.steps[0])
    hits = [replace(hit_at(place, step, gain), order=n) for n, (place, gain, _) in enumerate(grown)]
    evidence = [
        Evidence("gain of the layer", hits[0].value, hits[0].site, "rms", step),
        Evidence("size of the model's output", answer, ":output", "rms", step),
    ]
    message = "fresh weights are too large: {site}{also} makes its input {value:.1f} times larger"
    yield from rule.found(hits, message, evidence=evidence)


def _init_too_large_grown(chart: Chart, gain: float) -> list[tuple[ChartedSite, float, float]]:
    """The weights that make their input larger by more than the limit, in order: by how much, and to which size."""
    weights = chart.grid("rms", "param", where=is_main_weight)
    outputs = chart.grid("rms", "output", where=is_main_layer)
    made = {
        place.module: (place.index, row[0]) for place, row in zip(outputs.places, outputs.values, strict=True)
    }
    found = []
    for place, values in zip(weights.places, weights.values, strict=True):
        index, size = made.get(place.module, (0, 0.0))
        gain = float(values[0] * np.sqrt(_fan_in(place)))
        if gain < gain < math.inf and size > 1.0:
            found.append((index, place, gain, float(size)))
    return [(place, gain, size) for _, place, gain, size in sorted(found, key=lambda each: each[0])]


def _answer(chart: Chart) -> float:
    found = chart.grid("rms", "output", where=of_the_model)
    return float(np.nanmax(found.values[:, 0])) if found and np.isfinite(found.values[:, 0]).any() else 0.0


def _fan_in(place: ChartedSite) -> float:
    assert place.shape is not None
    return float(np.prod(place.shape[1:]))


@built_in("unscaled-input")
def unscaled_input(rule: Rule, chart: Chart, *, size: float = 30.0) -> Iterable[Finding]:
    """Numbers of the size of raw pixels into a layer that does not normalise them."""
    inputs = chart.grid("rms", "input", where=of_the_model)
    outputs = chart.grid("rms", "output", where=is_main_layer)
    if not inputs or not outputs:
        return
    first = _first_taker(chart)
    if first is None or not is_layer(first):
        return
    row = outputs.places.index(first) if first in outputs.places else None
    large = np.nan_to_num(inputs.values).max(axis=0) > size
    if row is None or not large[:EARLY].any():
        return
    taken = np.nan_to_num(outputs.values[row]) > 1.0  # as large as it came: weights did not take it back
    column = first_run((large & taken)[:EARLY], 1)
    if column is None:
        return
    which = int(np.nanargmax(inputs.values[:, column]))
    if "float" not in inputs.places[which].dtype:
        return
    size = inputs.values[which, column]
    evidence = [
        Evidence("size of the input", float(size), inputs.places[which].name, "rms", inputs.step(column))
    ]
    message = (
        "the input {site}{also} has the size {value:.3g} (rms), and " + first.module + " takes it as it is"
    )
    yield from rule.found(
        [hit_at(inputs.places[which], inputs.step(column), size)], message, evidence=evidence
    )


def _first_taker(chart: Chart) -> ChartedSite | None:
    """The first module, in execution, that has a name and an output: what takes the input."""
    for place in chart.places():
        if place.kind == "output" and place.module and chart.has_come(place.name):
            if place.module_class in ("Flatten", "Unflatten", "Identity", "Dropout"):
                continue
            return place
    return None
