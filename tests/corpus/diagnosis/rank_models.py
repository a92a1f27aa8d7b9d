"""Models of the faults of ranks: one in two halves, one with batch norm, one with tied weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Halves", "Norms", "Tied", "padded_targets"]


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the same on each."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Halves(nn.Module):
    """Half of a hidden layer on each of two ranks; the norm before it is on both."""

    reduces = True

    def __init__(self, rank: int, *, reduces_norms: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        whole = nn.Linear(16, 64), nn.Linear(64, 4, bias=False)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4, bias=False)
        with torch.no_grad():
            part = slice(32 * rank, 32 * rank + 32)
            self.up.weight.copy_(whole[0].weight[part])
            self.up.bias.copy_(whole[0].bias[part])
            self.down.weight.copy_(whole[1].weight[:, part])
        if reduces_norms:
            self.norm.weight.register_hook(_summed)
            self.norm.bias.register_hook(_summed)

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = self.down(F.relu(self.up(self.norm(x))))
        return _Sum.apply(part) if self.reduces else part  # type: ignore[no-any-return, no-untyped-call]


def _summed(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


class Norms(nn.Module):
    """A layer with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.up(x))))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Tokens in and out by one and the same table."""

    def __init__(self, tokens: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.body = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.body(x))  # type: ignore[no-any-return]


def padded_targets(targets: Tensor, kept: float) -> Tensor:
    """Targets of which a part counts; the rest is ignored."""
    padded = targets.clone()
    padded[int(kept * len(targets)) :] = -100
    return padded
