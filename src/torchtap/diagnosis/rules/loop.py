"""The training loop: gradients that pile up, that are erased before they are used, or that no optimizer uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.facts import Fact
from torchtap.diagnosis.finding import Severity
from torchtap.diagnosis.rules.fact_rules import FactRule

__all__ = [
    "ErasedGradient",
    "ForeignOptimizer",
    "NeverUpdated",
    "NotOptimized",
    "NothingLearns",
    "RenewedOptimizer",
    "StaleGradient",
]


@final
@dataclass(frozen=True)
class StaleGradient(FactRule):
    """No zero_grad."""

    name: ClassVar[str] = "stale-gradient"
    concludes: ClassVar[str] = "An optimizer used gradients that the steps before had left behind."
    wrong_if: ClassVar[str] = "The loop adds gradients over updates on purpose."
    causes: ClassVar[tuple[str, ...]] = (
        "optimizer.zero_grad() is missing or comes after the wrong condition",
        "zero_grad() is called on another optimizer or model",
    )
    fix: ClassVar[str] = "optimizer.zero_grad()  # before each backward(), or after each optimizer.step()"
    message: ClassVar[str] = (
        "gradients are never set back: {site}{also} held last step's gradient when backward() began"
    )


@final
@dataclass(frozen=True)
class ErasedGradient(FactRule):
    """zero_grad between backward and step."""

    name: ClassVar[str] = "erased-gradient"
    concludes: ClassVar[str] = "Gradients were computed and then erased before the optimizer used them."
    wrong_if: ClassVar[str] = "The update of this one step was left out on purpose."
    causes: ClassVar[tuple[str, ...]] = ("zero_grad() stands between backward() and step()",)
    fix: ClassVar[str] = "optimizer.zero_grad(); loss.backward(); optimizer.step()  # in this order"
    message: ClassVar[str] = (
        "backward() computed gradients, but at optimizer.step() none is left at {site}{also}"
    )


@final
@dataclass(frozen=True)
class ForeignOptimizer(FactRule):
    """The optimizer holds other tensors than the model."""

    name: ClassVar[str] = "foreign-optimizer"
    concludes: ClassVar[str] = (
        "An optimizer steps on tensors that never get a gradient, while the model's do."
    )
    wrong_if: ClassVar[str] = "Its tensors get their gradients later, by hand."
    causes: ClassVar[tuple[str, ...]] = (
        "the optimizer was made before parameters were replaced (to a device, by a wrapper, by a new head)",
        "the optimizer was made of a copy of the model",
    )
    fix: ClassVar[str] = (
        "optimizer = SomeOptimizer(model.parameters())  # after the model is complete and in place"
    )
    message: ClassVar[str] = "the optimizer holds none of the model's parameters: {site}{also} got a gradient"


@final
@dataclass(frozen=True)
class NotOptimized(FactRule):
    """A parameter with a gradient in no optimizer."""

    name: ClassVar[str] = "not-in-optimizer"
    concludes: ClassVar[str] = "A parameter gets gradients, but no optimizer holds it."
    wrong_if: ClassVar[str] = (
        "It is left out on purpose; where more of the model is out than in, that is taken for granted and told as info."
    )
    causes: ClassVar[tuple[str, ...]] = (
        "a module that was added after the optimizer was made",
        "a parameter group that was forgotten",
    )
    fix: ClassVar[str] = "optimizer.add_param_group({'params': new_module.parameters()})"
    message: ClassVar[str] = "{site}{also} gets gradients, but is in no optimizer: it never learns"

    def grade(self, facts: list[Fact], chart: Chart) -> Severity:
        held = chart.structure.optimized & chart.structure.trainable
        inside = sum(chart.structure.sizes.get(site, 0) for site in held)
        outside = sum(chart.structure.sizes.get(fact.site, 0) for fact in facts)
        return "error" if inside >= outside else "info"


@final
@dataclass(frozen=True)
class NeverUpdated(FactRule):
    """No optimizer.step()."""

    name: ClassVar[str] = "never-updated"
    concludes: ClassVar[str] = "Gradients are computed again and again, and no optimizer uses them."
    wrong_if: ClassVar[str] = "Gradients are all that is wanted, for a look at the data or the weights."
    causes: ClassVar[tuple[str, ...]] = (
        "optimizer.step() is missing, or behind a condition that never holds",
        "another optimizer or model is stepped than the one that is watched",
    )
    fix: ClassVar[str] = "optimizer.step()  # after loss.backward()"
    message: ClassVar[str] = "gradients reach {site} and are never used: its weights stay as they are"


@final
@dataclass(frozen=True)
class NothingLearns(FactRule):
    """Updates without any gradient."""

    name: ClassVar[str] = "nothing-learns"
    concludes: ClassVar[str] = "The optimizer steps, and none of its parameters has a gradient."
    wrong_if: ClassVar[str] = "Gradients come later, by hand."
    causes: ClassVar[tuple[str, ...]] = (
        "loss.backward() is missing",
        "the loss was taken out of the graph: item(), detach(), numpy(), torch.tensor(loss), torch.no_grad()",
    )
    fix: ClassVar[str] = (
        "loss = criterion(model(x), y); loss.backward()  # the loss itself, not a copy of its value"
    )
    message: ClassVar[str] = "the optimizer steps, but no gradient came to {site}{also}"


@final
@dataclass(frozen=True)
class RenewedOptimizer(FactRule):
    """An optimizer for each step."""

    name: ClassVar[str] = "optimizer-renewed"
    concludes: ClassVar[str] = (
        "Each update is made by another optimizer: moments and step counts are lost each time."
    )
    wrong_if: ClassVar[str] = "The optimizer is meant to begin anew at each step."
    causes: ClassVar[tuple[str, ...]] = ("the optimizer is made inside of the loop",)
    fix: ClassVar[str] = "optimizer = AdamW(model.parameters())  # once, before the loop"
    message: ClassVar[str] = "an optimizer is made for each step and forgets what the last one knew ({site})"
