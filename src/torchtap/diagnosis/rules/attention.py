"""Attention and logits: sharp from the start, collapsing, growing without end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.finding import Evidence, Finding, Trust
from torchtap.diagnosis.places import ChartedSite
from torchtap.diagnosis.rules.base import Hit, Need, Rule, hit_at
from torchtap.diagnosis.rules.progress import has_improved
from torchtap.diagnosis.rules.windows import first_run, rises_steadily

__all__ = ["AttentionCollapse", "GrowingLogits", "SharpAttention"]

ENTROPY = (
    "attention_entropy"  # the leaf of a value that a probe logs: 1 is even attention, 0 is one position only
)


def is_entropy(place: ChartedSite) -> bool:
    return place.leaf == ENTROPY


def is_answer(place: ChartedSite) -> bool:
    return not place.module


@final
@dataclass(frozen=True)
class SharpAttention(Rule):
    """A fresh model that attends to single positions."""

    entropy: float = 0.6  # of what even attention has

    name: ClassVar[str] = "sharp-attention"
    concludes: ClassVar[str] = "Attention of a fresh model is sharp: its logits are too large from the start."
    trust: ClassVar[Trust] = "limit"
    needs: ClassVar[tuple[Need, ...]] = (Need(""),)
    wrong_if: ClassVar[str] = (
        "The model is built to attend sharply at the start; trained models are not judged."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "attention logits are not divided by the root of the head's width",
        "queries and keys are initialised too large",
    )
    fix: ClassVar[str] = "scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        found = chart.grid("value", "value", where=is_entropy)
        if not found or not chart.structure.fresh:
            return
        hits = []
        for row, place in enumerate(found.places):
            seen = np.flatnonzero(~np.isnan(found.values[row]))
            if (
                len(seen)
                and found.steps[seen[0]] == chart.steps[0]
                and found.values[row, seen[0]] < self.entropy
            ):
                hits.append(hit_at(place, found.step(seen[0]), found.values[row, seen[0]]))
        evidence = [
            Evidence("entropy over that of even attention", h.value, h.site, "value", h.step)
            for h in hits[:1]
        ]
        message = "fresh attention at {site}{also} is sharp: its entropy is {value:.0%} of even attention's"
        yield from self.found(hits, message, evidence=evidence)


@final
@dataclass(frozen=True)
class AttentionCollapse(Rule):
    """Attention that was spread out and now holds on to single positions everywhere."""

    entropy: float = 0.15
    was: float = 0.6

    name: ClassVar[str] = "attention-collapse"
    concludes: ClassVar[str] = (
        "Attention has lost nearly all of its entropy: its logits have grown too large."
    )
    trust: ClassVar[Trust] = "history"
    needs: ClassVar[tuple[Need, ...]] = (Need(""),)
    wrong_if: ClassVar[str] = "The task is to find one position, and the heads have learned to."
    causes: ClassVar[tuple[str, ...]] = (
        "a learning rate that is too large for the attention",
        "no normalisation of queries and keys",
    )
    fix: ClassVar[str] = "q, k = q_norm(q), k_norm(k)  # before the scores; or a smaller learning rate"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        found = chart.grid("value", "value", where=is_entropy)
        hits: list[Hit] = []
        for row, place in enumerate(found.places) if found else ():
            values = found.values[row]
            seen = np.flatnonzero(~np.isnan(values))
            if len(seen) < 4 or values[seen[0]] < self.was:
                continue
            column = first_run(values[seen] < self.entropy, 2)
            if column is not None:
                hits.append(hit_at(place, found.step(seen[column]), values[seen[column]]))
        evidence = [
            Evidence("entropy over that of even attention", h.value, h.site, "value", h.step)
            for h in hits[:1]
        ]
        message = "attention at {site}{also} has collapsed: its entropy is {value:.0%} of even attention's"
        yield from self.found(hits, message, evidence=evidence)


@final
@dataclass(frozen=True)
class GrowingLogits(Rule):
    """The model's answers grow and grow."""

    times: float = 10.0  # its early size
    size: float = 60.0  # beyond this, the differences that a softmax sees are lost in bfloat16
    window: int = 18

    name: ClassVar[str] = "growing-logits"
    concludes: ClassVar[str] = "The model's logits rise steadily to sizes that no probability needs."
    trust: ClassVar[Trust] = "history"
    needs: ClassVar[tuple[Need, ...]] = (Need(""), Need("output", "absmax"))
    wrong_if: ClassVar[str] = (
        "The outputs are no logits; this is judged only where a loss was seen to take them as such, and did not fall."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "a learning rate that is too large",
        "nothing holds the logits: no z-loss, no weight decay on the head",
    )
    fix: ClassVar[str] = "loss = loss + 1e-4 * logits.logsumexp(-1).pow(2).mean()  # z-loss"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        found = chart.grid("absmax", "output", where=is_answer)
        if not found or not chart.facts("classes") or found.values.shape[1] < self.window + 8:
            return
        hits = []
        for row, place in enumerate(found.places):
            values = found.values[row]
            column = self._outgrown(values)
            if column is not None and not has_improved(
                chart, found.step(column), 0.95
            ):  # who is right may be sure
                hits.append(hit_at(place, found.step(column), values[column]))
        evidence = [Evidence("largest logit", h.value, h.site, "absmax", h.step) for h in hits[:1]]
        yield from self.found(hits, "logits at {site}{also} rise steadily, to {value:.3g}", evidence=evidence)

    def _outgrown(self, values: npt.NDArray[np.float64]) -> int | None:
        """Where logits became too large, if they rose steadily until then."""
        early = float(np.nanmedian(values[:8])) if np.isfinite(values[:8]).any() else float("nan")
        column = first_run(values > max(self.size, self.times * early), 3)
        if column is None or column < self.window:
            return None
        return column if rises_steadily(values[column - self.window + 1 : column + 1]) else None
