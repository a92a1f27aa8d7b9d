"""Gradients that do not arrive: cut graphs, modules that are never called, gradients that are always zero.

A parameter that was frozen on purpose says so by requires_grad=False and is never meant here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.finding import Evidence, Finding, Trust
from torchtap.diagnosis.places import ChartedSite
from torchtap.diagnosis.rules.activity import is_whole
from torchtap.diagnosis.rules.base import Hit, Need, Rule, hit_at
from torchtap.diagnosis.rules.windows import first_run
from torchtap.plan.names import site_name

__all__ = ["FrozenButNorms", "GradientCut", "NeverCalled", "NoGradient", "ZeroGradient"]

_NORMS = ("BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm", "SyncBatchNorm")


def is_norm(place: ChartedSite) -> bool:
    """Whether a site belongs to a layer that normalises."""
    return any(word in place.module_class for word in _NORMS)


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


@final
@dataclass(frozen=True)
class GradientCut(Rule):
    """Everything before some point is called and gets no gradient; everything after it does."""

    columns: int = 2  # updates that were recorded

    name: ClassVar[str] = "gradient-cut"
    concludes: ClassVar[str] = "The graph is cut: no gradient flows back past this module."
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need(""), Need("output", "rms"), Need("param_grad", "absmax"))
    wrong_if: ClassVar[str] = (
        "The first part of the model is run without gradients on purpose and was not frozen."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "detach(), .data, .item(), numpy() or torch.no_grad() behind this module",
        "a reentrant checkpoint none of whose inputs requires a gradient",
        "an op that has no gradient (argmax, round, a comparison)",
    )
    fix: ClassVar[str] = "checkpoint(block, x, use_reentrant=False)  # or take the detach() away"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        step = _judged_at(chart, self.columns)
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
        yield from self.found(hits, message, severity="error", evidence=evidence)


@final
@dataclass(frozen=True)
class NoGradient(Rule):
    """Called, but behind no part of the loss."""

    columns: int = 3

    name: ClassVar[str] = "no-gradient"
    concludes: ClassVar[str] = "A module is called, but what it returns does not reach the loss."
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need(""), Need("output", "rms"), Need("param_grad", "absmax"))
    wrong_if: ClassVar[str] = "It serves something else than this loss: another head, a teacher."
    causes: ClassVar[tuple[str, ...]] = (
        "its output is detached or unused",
        "it serves another loss",
    )
    fix: ClassVar[str] = "Look at what is done with its output; freeze it if it is not meant to learn."

    def judge(self, chart: Chart) -> Iterable[Finding]:
        step = _judged_at(chart, self.columns)
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
        yield from self.found(hits, "{site}{also} is called but never gets a gradient", severity="info")


@final
@dataclass(frozen=True)
class NeverCalled(Rule):
    """Defined, meant to learn, never called."""

    columns: int = 3

    name: ClassVar[str] = "never-called"
    concludes: ClassVar[str] = "A module is meant to learn, but no pass calls it."
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need(""), Need("output", "rms"), Need("param_grad", "absmax"))
    wrong_if: ClassVar[str] = "It is for other inputs or another phase of the training."
    causes: ClassVar[tuple[str, ...]] = (
        "it was forgotten in forward()",
        "another module is called in its place",
    )
    fix: ClassVar[str] = "Call it in forward(), or remove it."

    def judge(self, chart: Chart) -> Iterable[Finding]:
        step = _judged_at(chart, self.columns)
        parameters = _parameters(chart)
        if step is None or not any(each.order is not None for each in parameters):
            return
        hits = [
            Hit(each.site, step, 0.0, index)
            for index, each in enumerate(parameters)
            if each.order is None and not each.has_gradient
        ]
        yield from self.found(hits, "{site}{also} belongs to a module that is never called", severity="info")


@final
@dataclass(frozen=True)
class ZeroGradient(Rule):
    """A gradient that is exactly zero, step after step, while others are not."""

    length: int = 5  # records in a row

    name: ClassVar[str] = "zero-gradient"
    concludes: ClassVar[str] = (
        "A parameter's gradient is exactly zero in each of several steps: it does not learn."
    )
    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need("param_grad", "absmax"),)
    wrong_if: ClassVar[str] = (
        "It waits for something that has not begun, such as a factor that is still zero."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "what it feeds is multiplied by zero, clamped, or dead",
        "the loss does not depend on it",
    )
    fix: ClassVar[str] = "Look for a dead activation, a clamp or a factor of zero between it and the loss."

    def judge(self, chart: Chart) -> Iterable[Finding]:
        found = chart.grid("absmax", "param_grad", last=self.length + 8)
        if not found:
            return
        zero = found.values == 0
        if not (np.nan_to_num(found.values) > 0).any() or self._is_silenced(chart):
            return
        hits = []
        for row in np.flatnonzero(zero.any(axis=1)):
            column = first_run(zero[row], self.length)
            if column is not None and not is_norm(found.places[row]):
                hits.append(hit_at(found.places[row], found.step(column), 0.0))
        # A loss of differences does not depend on a last bias: alone, it is no sign of anything.
        grave = any(not hit.site.endswith("bias") for hit in hits)
        message = "{site}{also}: exactly zero in each of several steps, so these parameters do not learn"
        evidence = [Evidence("largest gradient", 0.0, hit.site, "absmax", hit.step) for hit in hits[:1]]
        yield from self.found(hits, message, severity="warning" if grave else "info", evidence=evidence)

    def _is_silenced(self, chart: Chart) -> bool:
        """Whether an output is nothing but zeros: then there is no gradient before it, and `dead` says why."""
        silent = chart.grid("zeros", "output", last=self.length, where=is_whole)
        return bool(silent) and bool((silent.values == 1).all(axis=1).any())


@final
@dataclass(frozen=True)
class FrozenButNorms(Rule):
    """All is frozen but the layers that normalise, the head too."""

    name: ClassVar[str] = "only-norms-learn"
    concludes: ClassVar[str] = (
        "Everything is frozen but normalisation layers; even the last layer cannot learn."
    )
    trust: ClassVar[Trust] = "limit"
    needs: ClassVar[tuple[Need, ...]] = (Need(""),)
    wrong_if: ClassVar[str] = "Only the norms are meant to be tuned, and the head fits already."
    causes: ClassVar[tuple[str, ...]] = (
        "a loop over modules or names that freezes more than was meant",
        "the head was replaced before everything was frozen",
    )
    fix: ClassVar[str] = "for p in model.head.parameters(): p.requires_grad_(True)"

    def judge(self, chart: Chart) -> Iterable[Finding]:
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
            yield from self.found(hits, message, evidence=evidence)
