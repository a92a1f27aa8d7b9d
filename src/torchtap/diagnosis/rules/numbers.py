"""Number formats: the origin of the first NaN or infinity, values near overflow, underflow, a collapsing loss scale.

The origin is the earliest step and, within it, the earliest site in the order of computation: parameters exist before
the forward, then the forward in execution order, the backward in reverse, the parameters' gradients last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from torchtap.diagnosis.chart import Chart, ChartedSite, ChartGrid
from torchtap.diagnosis.finding import Evidence, Finding
from torchtap.diagnosis.rule_type import (
    LAST,
    Hit,
    Rule,
    built_in,
    first_run,
    first_run_of,
    hit_at,
)

_STAGE = {"param": 0, "input": 1, "output": 1, "attention": 1, "value": 1}
_STAGE |= {"grad_output": 2, "grad_input": 2, "param_grad": 3, "buffer": 4, "update": 5, "optim_state": 5}
_KINDS = ("param", "input", "output", "attention", "grad_output", "grad_input", "param_grad", "buffer")
_GRADIENTS = ("grad_output", "grad_input", "param_grad")
_MASKS = ("input", "attention", "value", "buffer")


def computed_order(place: ChartedSite) -> tuple[int, int]:
    """Sorts sites by when a training step computes them."""
    stage = _STAGE.get(place.kind, 1)
    return stage, -place.index if stage in (2, 3) else place.index


class _Outbreak(NamedTuple):
    """The first values of a site that are not finite."""

    step: int
    place: ChartedSite
    values: float  # how many
    word: str  # NaN or inf
    rank: int | None = None  # that it is on, if the ranks together do not show it


@built_in("nonfinite")
def nonfinite(rule: Rule, chart: Chart) -> Iterable[Finding]:
    """The origin of the first value that is not a finite number."""
    first: dict[str, _Outbreak] = {}
    # Replicas are folded to the lowest rank's numbers, so each rank is looked at by itself too.
    for rank, own in [(None, chart), *chart.ranks.items()]:
        for statistic, word in (("nans", "NaN"), ("infs", "inf")):
            _note_first(own, own.grid(statistic, *_KINDS), word, first, rank)
    order = sorted(first.values(), key=lambda each: (each.step, computed_order(each.place)))
    if order and not _is_of_the_loss(chart, order[0]):
        seen = chart if order[0].rank is None else chart.ranks[order[0].rank]
        yield _told(order, _where(order[0], seen.grid("nans", *_KINDS)), rule)
    else:
        yield from _of_the_loss(chart, rule)


def _told(order: Sequence[_Outbreak], where: str, rule: Rule) -> Finding:
    step, place, count, word, rank = order[0]
    on = "" if rank is None else f" on rank {rank}"
    spread = sum(each.step == step for each in order)
    others = f"; {spread - 1} more sites had one in the same step" if spread > 1 else ""
    article, statistic = ("an", "infs") if word == "inf" else ("a", "nans")
    return Finding(
        rule.name,
        "error",
        place.name,
        step,
        count,
        f"the first value that is not a finite number is {article} {word} at {place.name}{on}, step {step} "
        f"({count:,.0f} of them){where}{others}",
        rule.fix,
        tuple(each.place.name for each in order),
        rule.causes,
        (Evidence("values that are not finite", count, place.name, statistic, step),),
        rule.trust,
    )


def _of_the_loss(chart: Chart, rule: Rule) -> Iterable[Finding]:
    """A loss that is not finite though every value of the model is: it was born in the loss itself."""
    facts = chart.facts("loss-not-finite")
    hits = [Hit(fact.site, fact.step, fact.value) for fact in facts[:1]]
    causes = (
        "a target that is not finite",
        "a mean over no element: every target is left out",
        *rule.causes[:1],
    )
    fix = "Look at the targets of that step: the model's own values are finite."
    text = f": {facts[0].text}" if facts else ""
    yield from rule.found(
        hits, "the loss is not a finite number" + text, severity="error", causes=causes, fix=fix
    )


def _note_first(
    chart: Chart, found: ChartGrid, word: str, first: dict[str, _Outbreak], rank: int | None
) -> None:
    """Note the first step with such values for each site, if no earlier one is known."""
    for row in np.flatnonzero((found.values > 0).any(axis=1)):
        place, counts = found.places[row], found.values[row]
        seen = counts[~np.isnan(counts)]
        if word == "inf" and place.kind in _MASKS and bool((seen > 0).all()):
            continue
        bad = counts > 0
        if place.kind in _GRADIENTS:
            bad &= ~chart.skipped[-len(bad) :]
        hits = np.flatnonzero(bad)
        if len(hits):
            step = found.step(hits[0])
            known = first.get(place.name)
            if known is None or step < known.step:
                first[place.name] = _Outbreak(step, place, float(counts[hits[0]]), word, rank)


def _is_of_the_loss(chart: Chart, first: _Outbreak) -> bool:
    """Return True if gradients are the first: those of a loss that is not finite are its effect."""
    if first.place.kind not in _GRADIENTS:
        return False
    return any(fact.step <= first.step for fact in chart.facts("loss-not-finite"))


def _where(first: _Outbreak, nans: ChartGrid) -> str:
    """Of a gradient that went bad between two modules: the one in whose backward that happened."""
    place = first.place
    if place.kind != "grad_output":
        return ""
    column = int(np.flatnonzero(nans.steps == first.step)[0])
    after = [
        (other, nans.values[row, column])
        for row, other in enumerate(nans.places)
        if other.kind == "grad_output" and other.index > place.index
    ]
    finite = [other for other, count in after if count == 0]
    return f"; it was born in the backward of {finite[0].module}" if finite else ""


_SMALLEST_NORMAL = 2.0**-14  # of float16


def is_half(place: ChartedSite) -> bool:
    """Return True if a site's values are float16."""
    return place.dtype == "float16"


@built_in("near-overflow")
def near_overflow(rule: Rule, chart: Chart, *, size: float = 60000.0) -> Iterable[Finding]:
    """float16 values next to the largest there is."""
    found = chart.grid("absmax", "output", last=LAST, where=is_half)
    hits = []
    for row in np.flatnonzero((found.values >= size).any(axis=1)) if found else ():
        column = first_run(found.values[row] >= size, 1)
        assert column is not None
        hits.append(hit_at(found.places[row], found.step(column), found.values[row, column]))
    evidence = [Evidence("largest magnitude", h.value, h.site, "absmax", h.step) for h in hits[:1]]
    yield from rule.found(
        hits, "{site}{also} reaches {value:,.0f}, next to the largest float16", evidence=evidence
    )


@built_in("underflow")
def underflow(rule: Rule, chart: Chart, *, share: float = 0.3, length: int = 2) -> Iterable[Finding]:
    """float16 gradients at the bottom of their range."""
    kinds = ("grad_output", "param_grad")
    sizes = chart.grid("absmax", *kinds, last=LAST, where=is_half)
    zeros = chart.grid("zeros", *kinds, last=LAST, where=is_half)
    if not sizes or sizes.values.shape != zeros.values.shape:
        return
    low = (sizes.values < _SMALLEST_NORMAL) & (zeros.values >= share)
    hits = []
    for row in np.flatnonzero(low.any(axis=1)):
        column = first_run_of(low[row], ~np.isnan(sizes.values[row]), length)
        if column is not None:
            hits.append(hit_at(sizes.places[row], sizes.step(column), zeros.values[row, column]))
    evidence = [Evidence("share of zeros", h.value, h.site, "zeros", h.step) for h in hits[:1]]
    message = "{value:.0%} of the gradient at {site}{also} is zero: it lies below what float16 can hold"
    yield from rule.found(hits, message, evidence=evidence)


@built_in("loss-scale")
def loss_scale(
    rule: Rule,
    chart: Chart,
    *,
    length: int = 12,  # in a row; a scaler that begins at 65,536 is then at 16
) -> Iterable[Finding]:
    """Update after update is left out."""
    column = first_run(chart.skipped, length)
    if column is None:
        return
    step = int(chart.steps[column])
    hits = [Hit(_first_bad(chart), step, float(length))]
    evidence = [Evidence("updates left out in a row", float(length), step=step)]
    message = "{value:.0f} updates in a row were left out by the gradient scaler ({site})"
    yield from rule.found(hits, message, severity="error", evidence=evidence)


def _first_bad(chart: Chart) -> str:
    """The first site whose gradient is not finite in the skipped steps, against the order of the forward."""
    for kind in ("output", "grad_output", "param_grad"):
        found = chart.grid("infs", kind), chart.grid("nans", kind)
        for grid in found:
            bad = (grid.values > 0).any(axis=1) if grid else np.zeros(0, np.bool_)
            rows = np.flatnonzero(bad)
            if len(rows):
                return grid.places[int(rows[0] if kind == "output" else rows[-1])].name
    return ":output"
