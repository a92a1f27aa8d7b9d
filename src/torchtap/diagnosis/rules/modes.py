"""Modes: training in evaluation mode, evaluating in training mode, a module that does not hear `eval()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torchtap.diagnosis.finding import Severity
from torchtap.diagnosis.rules.fact_rules import FactRule

__all__ = ["EvaluatesInTraining", "IgnoresEval", "TrainsInEval"]


@final
@dataclass(frozen=True)
class TrainsInEval(FactRule):
    """Updates while every layer that has a mode is in evaluation mode."""

    name: ClassVar[str] = "trains-in-eval"
    concludes: ClassVar[str] = (
        "The model is trained in evaluation mode: dropout is off, batch norm learns no statistics."
    )
    wrong_if: ClassVar[str] = (
        "It is meant, as in some fine-tuning; with most of the model frozen nothing is said."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "model.eval() of an evaluation was not followed by model.train()",
        "the model was loaded in evaluation mode and never switched",
    )
    fix: ClassVar[str] = "model.train()  # at the start of each epoch"
    severity: ClassVar[Severity] = "warning"
    message: ClassVar[str] = "the optimizer updates while the model is in evaluation mode ({site}{also})"


@final
@dataclass(frozen=True)
class EvaluatesInTraining(FactRule):
    """Passes without gradients, apart from the training's own, in training mode."""

    name: ClassVar[str] = "evaluates-in-train"
    concludes: ClassVar[str] = (
        "The model is evaluated in training mode: dropout is on, batch norm is changed by test data."
    )
    wrong_if: ClassVar[str] = (
        "The pass belongs to the training itself, such as a rollout; those that come before the first update or with "
        "each step are passed over."
    )
    causes: ClassVar[tuple[str, ...]] = ("model.eval() is missing before the evaluation",)
    fix: ClassVar[str] = "model.eval()  # before the evaluation, and model.train() after it"
    severity: ClassVar[Severity] = "warning"
    message: ClassVar[str] = "a pass without gradients came in training mode, with {site}{also} switched on"


@final
@dataclass(frozen=True)
class IgnoresEval(FactRule):
    """Dropout or batch norm that goes on in an evaluation."""

    name: ClassVar[str] = "ignores-eval"
    concludes: ClassVar[str] = "The model is in evaluation mode, but one module goes on as in training."
    wrong_if: ClassVar[str] = "Dropout is kept on purpose, for several samples of one answer."
    causes: ClassVar[tuple[str, ...]] = (
        "functional dropout without training=self.training",
        "a module that overrides train() or was switched by hand",
    )
    fix: ClassVar[str] = "x = F.dropout(x, p, training=self.training)"
    severity: ClassVar[Severity] = "warning"
    message: ClassVar[str] = "{site}{also} goes on in training mode while the model is evaluated"
