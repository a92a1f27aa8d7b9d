"""What a loss is asked: its sign, its dimensions, its classes, and the order in which they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.finding import Finding, Severity
from torchtap.diagnosis.rules.base import Hit
from torchtap.diagnosis.rules.fact_rules import FactRule

__all__ = ["LossBroadcasts", "LossMaximised", "OneClass", "SoftmaxDimension", "SortedClasses"]


@final
@dataclass(frozen=True)
class LossMaximised(FactRule):
    """An error that is made larger."""

    name: ClassVar[str] = "loss-maximised"
    concludes: ClassVar[str] = "The training makes an error larger: its sign is wrong."
    wrong_if: ClassVar[str] = (
        "The model is meant to get worse at this, as in an attack; two models or optimizers are passed over."
    )
    causes: ClassVar[tuple[str, ...]] = ("a minus sign before the loss", "maximize=True in the optimizer")
    fix: ClassVar[str] = "loss = F.cross_entropy(logits, targets)  # no minus sign, and no maximize=True"
    message: ClassVar[str] = "the training makes its error larger ({site})"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        yield from super().judge(chart)
        told, meant = chart.facts("maximises"), chart.facts("error-is-loss")
        if told and meant and not chart.facts(self.name):
            hits = [Hit(told[0].site, max(told[0].step, meant[0].step), 0.0)]
            yield from self.found(hits, self.message + self.told(told), severity=self.severity)


@final
@dataclass(frozen=True)
class SoftmaxDimension(FactRule):
    """Probabilities that sum to one over the wrong dimension."""

    name: ClassVar[str] = "softmax-dimension"
    concludes: ClassVar[str] = (
        "Probabilities of classes were normalised over another dimension, such as the batch."
    )
    wrong_if: ClassVar[str] = "Never: nll_loss takes dimension 1 for the classes."
    causes: ClassVar[tuple[str, ...]] = ("softmax(dim=0), or another dim than that of the classes",)
    fix: ClassVar[str] = "F.cross_entropy(logits, targets)  # or F.log_softmax(logits, dim=1)"
    message: ClassVar[str] = "softmax goes over the wrong dimension ({site})"


@final
@dataclass(frozen=True)
class LossBroadcasts(FactRule):
    """Every answer against every target."""

    name: ClassVar[str] = "loss-broadcasts"
    concludes: ClassVar[str] = (
        "Answers and targets have different shapes: each answer is held against every target."
    )
    wrong_if: ClassVar[str] = "All pairs of answers and constants are meant."
    causes: ClassVar[tuple[str, ...]] = (
        "answers of shape (n, 1) and targets of shape (n), or the other way round",
    )
    fix: ClassVar[str] = "loss = F.mse_loss(model(x).squeeze(-1), y)"
    message: ClassVar[str] = "the loss compares every answer with every target ({site})"


@final
@dataclass(frozen=True)
class OneClass(FactRule):
    """Cross-entropy over a single class."""

    name: ClassVar[str] = "one-class"
    concludes: ClassVar[str] = (
        "Cross-entropy is asked of one class only: it is zero, whatever the model says."
    )
    wrong_if: ClassVar[str] = "Never: a softmax over one number is one."
    causes: ClassVar[tuple[str, ...]] = ("a head with one output and a loss for several classes",)
    fix: ClassVar[str] = (
        "F.binary_cross_entropy_with_logits(logits, targets)  # or a head with one output a class"
    )
    message: ClassVar[str] = "cross-entropy over one class is always zero ({site}): nothing is learned"


@final
@dataclass(frozen=True)
class SortedClasses(FactRule):
    """Batches of one class each."""

    name: ClassVar[str] = "sorted-classes"
    concludes: ClassVar[str] = "Each batch has samples of one class only: the data is sorted."
    wrong_if: ClassVar[str] = "Batches are made of one class on purpose, as in some few-shot learning."
    causes: ClassVar[tuple[str, ...]] = ("the data is sorted by class and is not shuffled",)
    fix: ClassVar[str] = "DataLoader(data, batch_size=32, shuffle=True)"
    severity: ClassVar[Severity] = "warning"
    message: ClassVar[str] = "every batch has one class only ({site})"
