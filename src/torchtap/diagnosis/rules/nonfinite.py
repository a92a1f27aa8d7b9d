"""Where the first NaN or infinity came from.

The earliest step that has one, and at that step the earliest site in the order in which a training step computes:
parameters are there before the forward, then the forward in execution order, then the backward in the reverse of it,
parameters' gradients last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import numpy as np

from torchtap.diagnosis.chart import Chart, ChartGrid
from torchtap.diagnosis.finding import Evidence, Finding, Trust
from torchtap.diagnosis.places import ChartedSite
from torchtap.diagnosis.rules.base import Hit, Need, Rule

__all__ = ["NonFinite", "computed_order"]

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


@final
@dataclass(frozen=True)
class NonFinite(Rule):
    """The origin of the first value that is not a finite number."""

    name: ClassVar[str] = "nonfinite"
    concludes: ClassVar[str] = "A value is NaN or infinite; the finding names the site where that began."
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need("output", "nans"),)
    wrong_if: ClassVar[str] = (
        "An infinity that an input, a buffer or an attention map always holds is a mask. Infinite gradients of a step "
        "that a scaler skipped are its way of finding the scale. Both are passed over."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "a division by zero, log or sqrt of zero in this module",
        "overflow of a half-precision number",
        "a bad sample, if the site is an input",
        "a learning rate that made the weights diverge",
    )
    fix: ClassVar[str] = (
        "Look at this site's inputs at that step: everything before it in the step was finite."
    )

    def judge(self, chart: Chart) -> Iterable[Finding]:
        nans, infs = chart.grid("nans", *_KINDS), chart.grid("infs", *_KINDS)
        first: dict[str, _Outbreak] = {}
        self._note_first(chart, nans, "NaN", first)
        self._note_first(chart, infs, "inf", first)
        order = sorted(first.values(), key=lambda each: (each.step, computed_order(each.place)))
        if order and not _is_of_the_loss(chart, order[0]):
            yield self._told(order, _where(order[0], nans))
        else:
            yield from self._of_the_loss(chart)

    def _told(self, order: Sequence[_Outbreak], where: str) -> Finding:
        step, place, count, word = order[0]
        spread = sum(each.step == step for each in order)
        others = f"; {spread - 1} more sites had one in the same step" if spread > 1 else ""
        article, statistic = ("an", "infs") if word == "inf" else ("a", "nans")
        return Finding(
            self.name,
            "error",
            place.name,
            step,
            count,
            f"the first value that is not a finite number is {article} {word} at {place.name}, step {step} "
            f"({count:,.0f} of them){where}{others}",
            self.fix,
            tuple(each.place.name for each in order),
            self.causes,
            (Evidence("values that are not finite", count, place.name, statistic, step),),
            self.trust,
        )

    def _of_the_loss(self, chart: Chart) -> Iterable[Finding]:
        """A loss that is not finite though every value of the model is: it was born in the loss itself."""
        facts = chart.facts("loss-not-finite")
        hits = [Hit(fact.site, fact.step, fact.value) for fact in facts[:1]]
        causes = (
            "a target that is not finite",
            "a mean over no element: every target is left out",
            *self.causes[:1],
        )
        fix = "Look at the targets of that step: the model's own values are finite."
        text = f": {facts[0].text}" if facts else ""
        yield from self.found(
            hits, "the loss is not a finite number" + text, severity="error", causes=causes, fix=fix
        )

    def _note_first(self, chart: Chart, found: ChartGrid, word: str, first: dict[str, _Outbreak]) -> None:
        """Where and when such values came first, site by site, if none came there before."""
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
                    first[place.name] = _Outbreak(step, place, float(counts[hits[0]]), word)


def _is_of_the_loss(chart: Chart, first: _Outbreak) -> bool:
    """Whether gradients are the first: those of a loss that is not finite are its effect."""
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
