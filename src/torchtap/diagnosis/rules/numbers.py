"""Limits of number formats: near overflow, underflow of gradients, a loss scale that collapses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.finding import Evidence, Finding, Trust
from torchtap.diagnosis.places import ChartedSite
from torchtap.diagnosis.rules.base import Hit, Need, Rule, hit_at
from torchtap.diagnosis.rules.windows import LAST, first_run, first_run_of

__all__ = ["LossScale", "NearOverflow", "Underflow"]

_SMALLEST_NORMAL = 2.0**-14  # of float16


def is_half(place: ChartedSite) -> bool:
    """Whether a site's values are float16."""
    return place.dtype == "float16"


@final
@dataclass(frozen=True)
class NearOverflow(Rule):
    """float16 values next to the largest there is."""

    size: float = 6.0e4

    name: ClassVar[str] = "near-overflow"
    concludes: ClassVar[str] = "A float16 value is next to the largest number of its dtype, 65,504."
    trust: ClassVar[Trust] = "limit"
    needs: ClassVar[tuple[Need, ...]] = (Need("output", "absmax"),)
    wrong_if: ClassVar[str] = "The value is a mask's large negative number."
    causes: ClassVar[tuple[str, ...]] = ("activations that grow with depth or steps",)
    fix: ClassVar[str] = "torch.autocast('cuda', torch.bfloat16)  # bfloat16 has the range of float32"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        found = chart.grid("absmax", "output", last=LAST, where=is_half)
        hits = []
        for row in np.flatnonzero((found.values >= self.size).any(axis=1)) if found else ():
            column = first_run(found.values[row] >= self.size, 1)
            assert column is not None
            hits.append(hit_at(found.places[row], found.step(column), found.values[row, column]))
        evidence = [Evidence("largest magnitude", h.value, h.site, "absmax", h.step) for h in hits[:1]]
        yield from self.found(
            hits, "{site}{also} reaches {value:,.0f}, next to the largest float16", evidence=evidence
        )


@final
@dataclass(frozen=True)
class Underflow(Rule):
    """float16 gradients at the bottom of their range."""

    zeros: float = 0.3
    length: int = 2

    name: ClassVar[str] = "underflow"
    concludes: ClassVar[str] = "float16 gradients are so small that many become zero."
    trust: ClassVar[Trust] = "limit"
    needs: ClassVar[tuple[Need, ...]] = (Need("grad_output", "absmax"), Need("grad_output", "zeros"))
    wrong_if: ClassVar[str] = "The layer has nothing left to learn."
    causes: ClassVar[tuple[str, ...]] = ("no GradScaler", "a loss that is divided by too much")
    fix: ClassVar[str] = "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        kinds = ("grad_output", "param_grad")
        sizes = chart.grid("absmax", *kinds, last=LAST, where=is_half)
        zeros = chart.grid("zeros", *kinds, last=LAST, where=is_half)
        if not sizes or sizes.values.shape != zeros.values.shape:
            return
        low = (sizes.values < _SMALLEST_NORMAL) & (zeros.values >= self.zeros)
        hits = []
        for row in np.flatnonzero(low.any(axis=1)):
            column = first_run_of(low[row], ~np.isnan(sizes.values[row]), self.length)
            if column is not None:
                hits.append(hit_at(sizes.places[row], sizes.step(column), zeros.values[row, column]))
        evidence = [Evidence("share of zeros", h.value, h.site, "zeros", h.step) for h in hits[:1]]
        message = "{value:.0%} of the gradient at {site}{also} is zero: it lies below what float16 can hold"
        yield from self.found(hits, message, evidence=evidence)


@final
@dataclass(frozen=True)
class LossScale(Rule):
    """Update after update is left out."""

    length: int = 12  # in a row; a scaler that begins at 65,536 is then at 16

    name: ClassVar[str] = "loss-scale"
    concludes: ClassVar[str] = "The gradient scaler leaves out update after update: its scale collapses."
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need("output", "nans"),)
    wrong_if: ClassVar[str] = "The scaler began far too high; it needs as many steps as it halves the scale."
    causes: ClassVar[tuple[str, ...]] = (
        "gradients that are infinite or NaN whatever the scale: an overflow in the forward",
        "scaler.update() is missing",
    )
    fix: ClassVar[str] = "Find the first value that is not finite; bfloat16 needs no scaler."

    def judge(self, chart: Chart) -> Iterable[Finding]:
        column = first_run(chart.skipped, self.length)
        if column is None:
            return
        step = int(chart.steps[column])
        hits = [Hit(_first_bad(chart), step, float(self.length))]
        evidence = [Evidence("updates left out in a row", float(self.length), step=step)]
        message = "{value:.0f} updates in a row were left out by the gradient scaler ({site})"
        yield from self.found(hits, message, severity="error", evidence=evidence)


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
