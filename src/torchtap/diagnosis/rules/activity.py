"""Values that carry nothing on: dead units, saturated activations, outputs that are one and the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from torchtap.diagnosis.chart import Chart, Numbers
from torchtap.diagnosis.finding import Evidence, Finding, Severity, Trust
from torchtap.diagnosis.places import ChartedSite
from torchtap.diagnosis.rules.base import Hit, Need, Rule, hit_at
from torchtap.diagnosis.rules.windows import LAST, first_run

__all__ = ["ConstantOutput", "DeadUnits", "DeadValues", "OutputCollapsed", "Saturated"]

_LAYERS = ("Linear", "Conv")


def is_layer(place: ChartedSite) -> bool:
    """Whether a site belongs to a linear layer or a convolution."""
    return any(word in place.module_class for word in _LAYERS)


def is_whole(place: ChartedSite) -> bool:
    """Whether a site is all that its module returns."""
    return not place.leaf


def is_layer_weight(place: ChartedSite) -> bool:
    return is_layer(place) and place.leaf.endswith("weight")


@final
@dataclass(frozen=True)
class DeadUnits(Rule):
    """Units that no sample of several steps makes fire: the rows of their gradient are exactly zero."""

    share: float = 0.4  # of a layer's units
    length: int = 3  # records in a row
    samples: int = 32  # values of a unit in a step; with fewer, silence is chance
    most: float = 0.75  # beyond this share nothing speaks for the layer
    often: float = 0.6  # of the samples fire the others; more, and what they see hardly changes

    name: ClassVar[str] = "dead-units"
    concludes: ClassVar[str] = "A large part of a layer's units fires for no sample and gets no gradient."
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need("param_grad", "dead_share", or_kind="output"),)
    wrong_if: ClassVar[str] = (
        "The units are for inputs that have not come yet. Where the others fire for most samples, as deep in a "
        "plain stack of fresh layers, it is not told: they are off by the sign of a value that hardly changes."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "a bias far below zero, or one huge step that pushed it there",
        "a learning rate that is too large",
        "inputs that are not scaled",
    )
    fix: ClassVar[str] = "nn.init.zeros_(layer.bias)  # or nn.LeakyReLU() in place of nn.ReLU()"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        # The gradient of a layer's weight tells; so does an output of which somebody keeps `Units`.
        hits = self._hits(chart, "param_grad", is_layer_weight) or self._hits(chart, "output", is_whole)
        message = "{value:.0%} of the units of {site}{also} never fire"
        evidence = [Evidence("share of dead units", h.value, h.site, "dead_share", h.step) for h in hits[:1]]
        yield from self.found(hits, message, evidence=evidence)

    def _hits(self, chart: Chart, kind: str, where: Callable[[ChartedSite], bool]) -> list[Hit]:
        found = chart.grid("dead_share", kind, last=LAST, where=where).recorded()
        if not (found.values >= self.share).any():
            return []
        samples = _samples(chart)
        off = _shares_off(chart)
        hits: list[Hit] = []
        for row in np.flatnonzero((found.values >= self.share).any(axis=1)):
            place = found.places[row]
            column = first_run(found.values[row] >= self.share, self.length)
            if column is None or samples.get(place.module, self.samples) < self.samples:
                continue
            dead = found.values[row, column]
            if not self._others_are_constant(dead, off.get(place.module, 1.0)):
                hits.append(hit_at(place, found.step(column), dead))
        return hits

    def _others_are_constant(self, dead: float, off: float) -> bool:
        """Whether the units that are not dead fire for most samples, given the share of values that are off."""
        return dead < self.most and 1 - (off - dead) / (1 - dead) > self.often


def _samples(chart: Chart) -> dict[str, float]:
    """How many values a unit of each module has in a step."""
    found: dict[str, float] = {}
    for place in chart.places():
        if place.kind == "output" and place.shape and len(place.shape) >= 2:
            units = place.shape[1] if "Conv" in place.module_class else place.shape[-1]
            found[place.module] = float(np.prod(place.shape)) / max(1, units)
    return found


def _shares_off(chart: Chart) -> dict[str, float]:
    """The share of each layer's values through which no gradient comes: those that its activation cuts off."""
    found = chart.grid("zeros", "grad_output", last=LAST, where=is_layer)
    return {
        place.module: float(np.median(seen))
        for place, row in zip(found.places, found.values, strict=True)
        if len(seen := row[~np.isnan(row)])
    }


@final
@dataclass(frozen=True)
class DeadValues(Rule):
    """An output that is nearly all zero."""

    share: float = 0.99
    length: int = 5

    name: ClassVar[str] = "dead"
    concludes: ClassVar[str] = "Nearly all values of an output are exactly zero, step after step."
    trust: ClassVar[Trust] = "threshold"
    needs: ClassVar[tuple[Need, ...]] = (Need("output", "zeros"),)
    wrong_if: ClassVar[str] = (
        "The output is sparse by design: a router, a mask, one-hot vectors. Parts of a tuple are passed over."
    )
    causes: ClassVar[tuple[str, ...]] = ("units that never fire", "an input that is nearly all zero")
    fix: ClassVar[str] = "Look at the learning rate, the biases and what feeds this module."

    def judge(self, chart: Chart) -> Iterable[Finding]:
        found = chart.grid("zeros", "output", last=LAST, where=is_whole)
        hits = []
        for row in np.flatnonzero((found.values >= self.share).any(axis=1)) if found else ():
            column = first_run(found.values[row] >= self.share, self.length)
            if column is not None:
                hits.append(hit_at(found.places[row], found.step(column), found.values[row, column]))
        message = "{value:.0%} of the values of {site}{also} are exactly zero"
        grades: dict[Severity, list[Hit]] = {
            "error": [each for each in hits if each.value == 1],  # nothing at all comes out
            "warning": [each for each in hits if each.value < 1],
        }
        for severity, some in grades.items():
            evidence = [Evidence("share of zeros", h.value, h.site, "zeros", h.step) for h in some[:1]]
            yield from self.found(some, message, severity=severity, evidence=evidence)


@final
@dataclass(frozen=True)
class ConstantOutput(Rule):
    """An output of many values that are all the same number, though not zero."""

    length: int = 3

    name: ClassVar[str] = "constant"
    concludes: ClassVar[str] = "Every value of an output is one and the same number."
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need("output", "std"), Need("output", "count"))
    wrong_if: ClassVar[str] = "It is meant to be a constant."
    causes: ClassVar[tuple[str, ...]] = ("weights of zero", "an input that is all the same")
    fix: ClassVar[str] = "Look at the module's weights and at its input: the output does not depend on it."

    def judge(self, chart: Chart) -> Iterable[Finding]:
        spread, sizes = (
            chart.grid("std", "output", last=LAST, where=is_whole),
            chart.grid("absmax", "output", last=LAST, where=is_whole),
        )
        counts = chart.grid("count", "output", last=LAST, where=is_whole)
        if (
            not spread
            or spread.values.shape != sizes.values.shape
            or spread.values.shape != counts.values.shape
        ):
            return
        same = (spread.values == 0) & (sizes.values > 0) & (counts.values >= 16)
        hits = []
        for row in np.flatnonzero(same.any(axis=1)):
            column = first_run(same[row], self.length)
            if column is not None:
                hits.append(hit_at(spread.places[row], spread.step(column), sizes.values[row, column]))
        yield from self.found(hits, "every value of {site}{also} is the same number, {value:.3g}")


@final
@dataclass(frozen=True)
class OutputCollapsed(Rule):
    """The model answers the same to every sample, though the samples differ."""

    share: float = 1e-6  # of the outputs' mean square that differs between samples
    length: int = 3

    name: ClassVar[str] = "collapsed"
    concludes: ClassVar[str] = "The model's output hardly depends on its input any more."
    trust: ClassVar[Trust] = "limit"
    needs: ClassVar[tuple[Need, ...]] = (Need("output", "between"), Need("input", "between"))
    wrong_if: ClassVar[str] = "The right answer is the same for every sample."
    causes: ClassVar[tuple[str, ...]] = (
        "the last layers only learned their biases: dead units, vanished signals before them",
        "targets that are all, or nearly all, the same",
        "a learning rate that is too large, or too strong a weight decay",
    )
    fix: ClassVar[str] = "Look at the first module, in order, whose output no longer differs between samples."

    def judge(self, chart: Chart) -> Iterable[Finding]:
        answers = chart.grid("between", "output", last=LAST)
        questions = chart.grid("between", "input", last=LAST)
        if not answers or not questions:
            return
        differ = (np.nan_to_num(questions.values) > 1e-4).any(axis=0)
        hits = []
        for row, place in enumerate(answers.places):
            column = first_run((answers.values[row] <= self.share) & differ, self.length)
            if column is not None:
                hits.append(hit_at(place, answers.step(column), answers.values[row, column]))
        message = "{site}{also} is the same for every sample, though the inputs differ"
        evidence = [
            Evidence("share that differs between samples", h.value, h.site, "between", h.step)
            for h in hits[:1]
        ]
        yield from self.found(hits, message, evidence=evidence)


@final
@dataclass(frozen=True)
class Saturated(Rule):
    """Hidden tanh and sigmoid layers that sit at the ends of their range."""

    tanh: float = 0.05  # mean of 1 - x²
    sigmoid: float = 0.02  # mean of x(1 - x)
    length: int = 3

    name: ClassVar[str] = "saturated"
    concludes: ClassVar[str] = "A hidden activation sits at the end of its range and passes no gradient."
    trust: ClassVar[Trust] = "limit"
    needs: ClassVar[tuple[Need, ...]] = (Need("output", "rms"), Need("output", "mean"))
    wrong_if: ClassVar[str] = (
        "The layer is a gate that is meant to be open or shut; the model's last layers are passed over."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "weights or inputs that are too large",
        "a learning rate that is too large",
    )
    fix: ClassVar[str] = "nn.init.xavier_normal_(layer.weight)  # and scale the inputs"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        sizes, means = chart.grid("rms", "output", last=LAST), chart.grid("mean", "output", last=LAST)
        if not sizes or sizes.values.shape != means.values.shape:
            return
        # What comes after the last layer is the model's answer, and may be sure of itself.
        layers = [place.index for place in sizes.places if is_layer(place)]
        hits = []
        for place, size, mean in zip(sizes.places, sizes.values, means.values, strict=True):
            room = self._room(place, size, mean)
            if room is None or not layers or place.index > layers[-1]:
                continue
            left, limit = room
            column = first_run(left <= limit, self.length)
            if column is not None:
                hits.append(hit_at(place, sizes.step(column), left[column]))
        evidence = [
            Evidence("room that is left, on average", h.value, h.site, "rms", h.step) for h in hits[:1]
        ]
        message = "{site}{also} is saturated: nearly every value sits at the end of its range"
        yield from self.found(hits, message, evidence=evidence)

    def _room(self, place: ChartedSite, size: Numbers, mean: Numbers) -> tuple[Numbers, float] | None:
        """How far values are from the ends of their range on average, and the limit; None of what has no such range."""
        if place.module_class == "Tanh":
            return 1 - size**2, self.tanh
        if place.module_class == "Sigmoid":
            return mean - size**2, self.sigmoid
        return None
