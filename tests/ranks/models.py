"""Untidy models for many ranks: a position table, a module that is used twice, a tuple, sizes that do not divide."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HIDDEN, LENGTH = 8, 12, 6


class FeedForward(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """Returns a tuple: what goes on, and a thing on the side."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = FeedForward(width, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        more = self.mlp(self.norm(x))
        return x + more, more.amax(-1)


class Model(nn.Module):
    def __init__(self, hidden: int = HIDDEN, *, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden=hidden) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)  # used twice
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.unused = nn.Linear(3, 3) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.positions(torch.arange(x.shape[1]))
        x = self.norm(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))


class Small(nn.Module):
    """A norm and two layers: little to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.head = nn.LayerNorm(WIDTH), FeedForward(), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.mlp(self.norm(x)))


class Stack(nn.Module):
    """Layers by name, which pipeline stages cut without renaming."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): FeedForward() for number in range(count)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + layer(x)
        return x


def batch(step: int, rows: int = 8, *, part: int = 0) -> tuple[Tensor, Tensor]:
    """The joined batch of a step; ranks take their rows of it."""
    source = torch.Generator().manual_seed(1000 * step + part)
    x = torch.randn(rows, LENGTH, WIDTH, generator=source, dtype=torch.get_default_dtype())
    return x, torch.randn(rows, LENGTH, 5, generator=source, dtype=torch.get_default_dtype())


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)
