"""Sizes that grow or fade: over the depth of a fresh model, and over the steps of a training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import EARLY, Chart, ChartGrid
from torchtap.diagnosis.finding import Evidence, Finding, Trust
from torchtap.diagnosis.places import ChartedSite
from torchtap.diagnosis.rules.activity import is_layer
from torchtap.diagnosis.rules.base import Hit, Need, Rule, hit_at
from torchtap.diagnosis.rules.progress import has_improved
from torchtap.diagnosis.rules.windows import LAST, first_run

__all__ = ["Exploding", "Fading", "InitTooLarge", "Shrinking", "UnscaledInput", "Vanishing"]


def is_main_layer(place: ChartedSite) -> bool:
    """The output, or its gradient, of the first call of a linear layer or convolution."""
    return is_layer(place) and not place.call and not place.leaf


@final
@dataclass(frozen=True)
class Exploding(Rule):
    """A size far beyond what it was in the first steps, and not on its way back."""

    times: float = 100.0
    length: int = 3

    name: ClassVar[str] = "exploding"
    concludes: ClassVar[str] = "A value grew to many times the size that it had in the first steps."
    trust: ClassVar[Trust] = "history"
    needs: ClassVar[tuple[Need, ...]] = (Need("output", "rms"),)
    wrong_if: ClassVar[str] = (
        "It began at almost nothing, as a factor that is initialised with zero does; what grows while the loss falls "
        "is passed over."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "a learning rate that is too large",
        "no clipping of gradients, no normalisation",
        "one bad batch",
    )
    fix: ClassVar[str] = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        hits: list[Hit] = []
        for kind in ("output", "grad_output", "param_grad"):
            found = chart.grid("rms", kind).recorded()
            if found and found.values.shape[1] >= 8:
                hits += self._grown(chart, found)
        evidence = [Evidence("times its early size", h.value, h.site, "rms", h.step) for h in hits[:1]]
        message = "{site}{also} grew to {value:.3g} times its early size, by step {step}"
        yield from self.found(hits, message, evidence=evidence)

    def _grown(self, chart: Chart, found: ChartGrid) -> Iterator[Hit]:
        """The places of one kind that grew for long enough, and lately."""
        base = _base_sizes(found.values)
        begin = max(8, found.values.shape[1] - LAST)
        over = found.values[:, begin:] > self.times * base[:, None]
        for row in np.flatnonzero(over.any(axis=1)):
            column = first_run(over[row], self.length)
            if column is None or base[row] <= 0:
                continue
            at = begin + column
            # Answers grow where a model becomes sure of what it has learned, gradients where a branch awakes.
            if not has_improved(chart, found.step(at)):
                yield hit_at(found.places[row], found.step(at), found.values[row, at] / base[row])


def _base_sizes(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What growth is measured by: what is tiny beside its kind at the start grows without harm."""
    early = _early_sizes(values)
    usual = np.nanmedian(early[early > 0]) if (early > 0).any() else np.nan
    return np.maximum(early, usual)


def _early_sizes(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The largest size in the first eight records: a start from zero is no start."""
    first = np.nan_to_num(values[:, :8], posinf=0.0)
    return np.asarray(first.max(axis=1), np.float64)


@final
@dataclass(frozen=True)
class Vanishing(Rule):
    """Gradients that shrink from layer to layer by about the same factor."""

    total: float = 1e-4  # of the gradient at the last layer is left at the first
    layers: int = 4
    length: int = 2

    name: ClassVar[str] = "vanishing"
    concludes: ClassVar[str] = "Gradients shrink from layer to layer: the layers near the input hardly learn."
    trust: ClassVar[Trust] = "limit"
    needs: ClassVar[tuple[Need, ...]] = (Need("grad_output", "rms"),)
    wrong_if: ClassVar[str] = "Other ways through the model carry the gradient past these layers."
    causes: ClassVar[tuple[str, ...]] = (
        "a deep stack of sigmoid or tanh layers",
        "weights that are initialised too small for the depth",
        "no residual connections, no normalisation",
    )
    fix: ClassVar[str] = (
        "nn.ReLU() or nn.GELU() in place of nn.Sigmoid(), with nn.init.kaiming_normal_(layer.weight)"
    )

    def judge(self, chart: Chart) -> Iterable[Finding]:
        found = chart.grid("rms", "grad_output", where=is_main_layer).recorded()
        if len(found.places) < self.layers or not found:
            return
        columns = np.array(
            [self._fades(found.values[:, at]) for at in range(min(found.values.shape[1], EARLY))]
        )
        column = first_run(columns, self.length)
        if column is None:
            return
        sizes = found.values[:, column]
        left = sizes[0] / sizes[-1]
        hits = [
            hit_at(place, found.step(column), size / sizes[-1])
            for place, size in zip(found.places, sizes, strict=True)
            if size < sizes[-1] * self.total**0.5
        ]
        evidence = [
            Evidence("gradient left of the last layer's", float(left), hits[0].site, "rms", hits[0].step)
        ]
        message = "gradients vanish on their way back: {site}{also} gets {value:.1e} of the last layer's"
        yield from self.found(hits, message, evidence=evidence)

    def _fades(self, sizes: npt.NDArray[np.float64]) -> bool:
        if not (np.isfinite(sizes).all() and (sizes > 0).all()):
            return False
        logs = np.log(sizes)
        if logs[0] - logs[-1] > np.log(self.total):
            return False
        # Layer by layer, not at one place: most of the way leads down.
        return bool((np.diff(logs) > 0).mean() >= 0.75)


@final
@dataclass(frozen=True)
class Fading(Rule):
    """A gradient far below what it was in the first steps, while others of its kind are not."""

    share: float = 1e-5
    length: int = 5

    name: ClassVar[str] = "fading"
    concludes: ClassVar[str] = "One layer's gradient has all but gone, while those of other layers go on."
    trust: ClassVar[Trust] = "history"
    needs: ClassVar[tuple[Need, ...]] = (Need("grad_output", "rms"),)
    wrong_if: ClassVar[str] = "The layer has nothing left to learn."
    causes: ClassVar[tuple[str, ...]] = (
        "an activation that saturated or died behind it",
        "a gate that has shut",
    )
    fix: ClassVar[str] = "Look at the map of gradients for the layer where they shrink."

    def judge(self, chart: Chart) -> Iterable[Finding]:
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
            gone = (left[row] < self.share) & (found.values[row, recent] > 0) & going_on
            column = first_run(gone, self.length)
            if column is not None and early[row] > 0:
                hits.append(hit_at(place, found.step(column + (recent.start or 0)), left[row, column]))
        evidence = [Evidence("left of its early gradient", h.value, h.site, "rms", h.step) for h in hits[:1]]
        yield from self.found(
            hits, "the gradient at {site}{also} faded to {value:.1e} of what it was", evidence=evidence
        )


@final
@dataclass(frozen=True)
class Shrinking(Rule):
    """Weights that lose half of their size within a few dozen steps, most of them alike."""

    left: float = 0.5
    steps: int = 60
    length: int = 2  # records in a row

    name: ClassVar[str] = "shrinking"
    concludes: ClassVar[str] = (
        "Weights shrink everywhere and fast: something other than the loss pulls them to zero."
    )
    trust: ClassVar[Trust] = "history"
    needs: ClassVar[tuple[Need, ...]] = (Need("param", "rms"),)
    wrong_if: ClassVar[str] = "They began far too large, and the loss makes them smaller."
    causes: ClassVar[tuple[str, ...]] = (
        "weight decay, times the learning rate, is too strong",
        "a penalty on the weights outweighs the loss",
    )
    fix: ClassVar[str] = "optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        found = chart.grid("rms", "param", where=is_main_weight)
        columns = np.flatnonzero(~np.isnan(found.values).all(axis=0)) if found else np.zeros(0, np.int64)
        if len(columns) <= self.length:
            return
        sizes, steps = found.values[:, columns], found.steps[columns]
        for at in range(max(self.length, len(columns) - LAST), len(columns)):
            before = int(np.searchsorted(steps, steps[at] - self.steps))
            left = sizes[:, at - self.length + 1 : at + 1] / np.maximum(sizes[:, before, None], 1e-30)
            # All but a few: what a loss makes smaller it does not make smaller everywhere.
            if at - before >= self.length and ((left < self.left).mean(axis=0) >= 0.9).all():
                at_step = int(steps[at])
                hits = [hit_at(place, at_step, left[row, -1]) for row, place in enumerate(found.places)]
                evidence = [Evidence("left of the weight", h.value, h.site, "rms", h.step) for h in hits[:1]]
                message = "weights shrink everywhere: {value:.0%} is left of {site}{also}"
                yield from self.found(hits, message, evidence=evidence)
                return


@final
@dataclass(frozen=True)
class InitTooLarge(Rule):
    """Fresh layers that each make their input several times larger."""

    gain: float = 4.0  # of a layer, by rms; He's initialisation has 1.4
    layers: int = 2
    answer: float = 20.0  # size of the output that one such layer alone is judged by

    name: ClassVar[str] = "init-too-large"
    concludes: ClassVar[str] = "Fresh weights are so large that values grow by a factor with each layer."
    trust: ClassVar[Trust] = "limit"
    needs: ClassVar[tuple[Need, ...]] = (Need(""), Need("param", "rms"), Need("output", "rms"))
    wrong_if: ClassVar[str] = "The weights are trained already; fresh weights alone are judged."
    causes: ClassVar[tuple[str, ...]] = (
        "an initialisation with too large a deviation",
        "a factor for another fan-in",
    )
    fix: ClassVar[str] = "nn.init.kaiming_normal_(layer.weight)"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        if not chart.structure.fresh or not len(chart.steps):
            return
        grown = self._grown(chart)
        answer = self._answer(chart)
        if len(grown) < (1 if answer > self.answer else self.layers):
            return
        # Where norms follow, the size of weights does not matter: values have to have grown.
        if answer <= self.answer / 2 and max(size for _, _, size in grown) < 2 * self.gain:
            return
        step = int(chart.steps[0])
        hits = [replace(hit_at(place, step, gain), order=n) for n, (place, gain, _) in enumerate(grown)]
        evidence = [
            Evidence("gain of the layer", hits[0].value, hits[0].site, "rms", step),
            Evidence("size of the model's output", answer, ":output", "rms", step),
        ]
        message = "fresh weights are too large: {site}{also} makes its input {value:.1f} times larger"
        yield from self.found(hits, message, evidence=evidence)

    def _grown(self, chart: Chart) -> list[tuple[ChartedSite, float, float]]:
        """The weights that make their input larger by more than the limit, in order: by how much, and to which size."""
        weights = chart.grid("rms", "param", where=is_main_weight)
        outputs = chart.grid("rms", "output", where=is_main_layer)
        made = {
            place.module: (place.index, row[0])
            for place, row in zip(outputs.places, outputs.values, strict=True)
        }
        found = []
        for place, values in zip(weights.places, weights.values, strict=True):
            index, size = made.get(place.module, (0, 0.0))
            gain = float(values[0] * np.sqrt(_fan_in(place)))
            if self.gain < gain < math.inf and size > 1.0:
                found.append((index, place, gain, float(size)))
        return [(place, gain, size) for _, place, gain, size in sorted(found, key=lambda each: each[0])]

    def _answer(self, chart: Chart) -> float:
        found = chart.grid("rms", "output", where=_is_answer)
        return (
            float(np.nanmax(found.values[:, 0])) if found and np.isfinite(found.values[:, 0]).any() else 0.0
        )


def is_main_weight(place: ChartedSite) -> bool:
    """The weight of a linear layer or convolution."""
    return (
        is_layer(place)
        and place.leaf.endswith("weight")
        and place.shape is not None
        and len(place.shape) >= 2
    )


def _is_answer(place: ChartedSite) -> bool:
    return not place.module


def _fan_in(place: ChartedSite) -> float:
    assert place.shape is not None
    return float(np.prod(place.shape[1:]))


@final
@dataclass(frozen=True)
class UnscaledInput(Rule):
    """Numbers of the size of raw pixels into a layer that does not normalise them."""

    size: float = 30.0

    name: ClassVar[str] = "unscaled-input"
    concludes: ClassVar[str] = (
        "The model's input is far from unit size, and its first layer takes it as it is."
    )
    trust: ClassVar[Trust] = "threshold"
    needs: ClassVar[tuple[Need, ...]] = (Need("input", "rms"), Need("output", "rms"))
    wrong_if: ClassVar[str] = "The weights were trained on inputs of this size."
    causes: ClassVar[tuple[str, ...]] = (
        "pixels from 0 to 255 that were not divided",
        "features that were not standardised",
    )
    fix: ClassVar[str] = "x = x.float() / 255  # or transforms.Normalize(mean, std)"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        inputs = chart.grid("rms", "input", where=_is_answer)
        outputs = chart.grid("rms", "output", where=is_main_layer)
        if not inputs or not outputs:
            return
        first = _first_taker(chart)
        if first is None or not is_layer(first):
            return
        row = outputs.places.index(first) if first in outputs.places else None
        large = np.nan_to_num(inputs.values).max(axis=0) > self.size
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
            "the input {site}{also} has the size {value:.3g} (rms), and "
            + first.module
            + " takes it as it is"
        )
        yield from self.found(
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
