"""Faults of numbers (D)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.kit import Case, Kit
from tests.corpus.diagnosis.models import MLP, points
from torch import Tensor, nn

__all__ = ["CASES"]


def half_overflow(kit: Kit) -> None:
    model = MLP(depth=4)

    def after(step: int) -> None:
        if kit.sick and step == 6:
            with torch.no_grad():
                model.layers[1].weight.mul_(3e5)

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), y)

    half = model.half()
    optimizer = torch.optim.SGD(half.parameters(), lr=0.05)
    kit.fit(half, optimizer, points(kit.seed), 12, prepare=Tensor.half, loss=loss, after_step=after)


def half_underflow(kit: Kit) -> None:
    model = MLP(depth=5).half() if kit.sick else MLP(depth=5)

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), y) * (3e-4 if kit.sick else 1.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepare = Tensor.half if kit.sick else Tensor.float
    kit.fit(model, optimizer, points(kit.seed), 12, prepare=prepare, loss=loss)


class Overflows(MLP):
    """Multiplies by a number that no scale can save."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * self.factor


def scale_collapses(kit: Kit) -> None:
    model = Overflows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call, batches = kit.ready(model), points(kit.seed)
    scaler = torch.amp.GradScaler("cpu")
    kit.doctor(call, optimizer)
    for step in range(24):
        x, y = batches(step)
        optimizer.zero_grad()
        logits = call(x)
        loss = F.cross_entropy(logits, y)
        if kit.sick:  # a term whose gradient is infinite, whatever the scale
            loss = loss + 0 * (logits - logits.detach()).abs().sum().sqrt()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        kit.updates += 1


class RootOfZero(nn.Module):
    """A norm by hand whose gradient at zero is not a number."""

    safe = False

    def forward(self, x: Tensor) -> Tensor:
        square = (x * x).sum(-1, keepdim=True)
        return x / (1 + (square + (1e-6 if self.safe else 0.0)).sqrt())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 32, bias=False)
        self.norm = RootOfZero()
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(x)))


def nan_in_backward(kit: Kit) -> None:
    model, batches = Normed(), points(kit.seed)
    model.norm.safe = not kit.sick

    def with_empty_row(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        if step == 5:
            x[0] = 0
        return x, y

    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), with_empty_row, 12)


CASES = [
    Case("D1", "float16 overflow", half_overflow, ("nonfinite",), ("layers.1", "layers.2"), 7),
    Case("D2", "float16 underflow", half_underflow, ("underflow",), ("layers", "head"), 0),
    Case(
        "D3",
        "loss scale collapses",
        scale_collapses,
        ("loss-scale", "nonfinite"),
        (":grad_output", ":output", "layers"),
        11,
    ),
    Case("D4", "NaN in backward", nan_in_backward, ("nonfinite",), ("inner", "norm"), 5),
]
