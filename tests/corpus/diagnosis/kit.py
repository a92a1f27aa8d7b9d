"""What a case is given: a seed, a doctor, perhaps a compiler; and the loop that most trainings have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.models import Batches
from torch import Tensor, nn
from torch.optim import Optimizer

import torchtap as tt

__all__ = ["Case", "Kit", "sequence_loss"]


def sequence_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every position."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


@dataclass
class Kit:
    """One training under a doctor."""

    seed: int
    sick: bool = True
    compiled: bool = False
    doctors: list[tt.Doctor] = field(default_factory=list)
    alarms: dict[str, int] = field(default_factory=dict)  # kind to the update before which it was told
    updates: int = 0
    run: str | None = None

    def doctor(self, model: Any, *optimizers: Optimizer) -> tt.Doctor:
        """A doctor with the default plan; what it finds is kept."""
        made = tt.doctor(model, *optimizers, quiet=True, on_finding=self._note, run=self.run)
        self.doctors.append(made)
        return made

    def _note(self, finding: tt.Finding) -> None:
        self.alarms.setdefault(finding.kind, self.updates)

    def ready(self, model: nn.Module) -> Any:
        """The model as it is called: compiled where that is asked for."""
        return torch.compile(model, backend="aot_eager") if self.compiled else model

    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        steps: int = 30,
        *,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        prepare: Callable[[Tensor], Tensor] = lambda x: x,
        zero: bool = True,
        before_step: Callable[[], None] = lambda: None,
        after_step: Callable[[int], None] = lambda step: None,
        call: Any = None,
    ) -> None:
        """The loop that most trainings have."""
        call = call if call is not None else self.ready(model)
        self.doctor(call, optimizer)
        for step in range(steps):
            x, y = batches(step)
            if zero:
                optimizer.zero_grad()
            loss(call(prepare(x)), y).backward()
            before_step()
            optimizer.step()
            self.updates = step + 1
            after_step(step)

    def close(self) -> None:
        """End the doctors."""
        for each in self.doctors:
            each.close()

    def findings(self) -> list[tt.Finding]:
        """What was found, the gravest first."""
        return [finding for each in self.doctors for finding in each.findings()]


@dataclass(frozen=True)
class Case:
    """A fault: names that are right for it, a part of the right site, and the earliest step that can show it."""

    number: str
    title: str
    train: Callable[[Kit], None]
    kinds: tuple[str, ...]
    site: tuple[str, ...]  # one of these is in the finding's site
    earliest: int
    compiles: bool = True

    def named(self, findings: Iterable[tt.Finding]) -> int | None:
        """The place of the first right name among the findings, from 1."""
        for place, finding in enumerate(findings, 1):
            if finding.kind in self.kinds:
                return place
        return None

    def located(self, findings: Iterable[tt.Finding]) -> bool:
        """Whether a right name comes with a right site."""
        return any(
            finding.kind in self.kinds and any(part in finding.site for part in self.site)
            for finding in findings
        )
