"""The default models of ``torchtap rcc``: the same network in two parametrisations.

Both are trained by Adam. In ``standard`` every layer has the same learning rate, so that wider layers move their
outputs more. In ``mup`` (maximal update parametrisation) the learning rate of what is as wide as the network is
divided by the width, and the last layer starts at zero.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from torchtap.monitors.widths import Setup

__all__ = ["mup", "standard"]

_INPUTS, _CLASSES, _BATCH, _RATE, _BASE = 32, 10, 64, 4e-4, 64


def standard(width: int) -> Setup:
    """One learning rate for all."""
    model = _network(width)
    return Setup(model, torch.optim.Adam(model.parameters(), lr=_RATE), _batches())


def mup(width: int) -> Setup:
    """Learning rates divided by the width where the input is as wide as the network."""
    model = _network(width)
    nn.init.zeros_(model.last.weight)
    scaled = _RATE * _BASE / width
    groups = [
        {"params": [*model.first.parameters(), model.hidden1.bias, model.hidden2.bias], "lr": _RATE},
        {"params": [model.hidden1.weight, model.hidden2.weight, model.last.weight], "lr": scaled},
    ]
    return Setup(model, torch.optim.Adam(groups), _batches())


class _Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(_INPUTS, width)
        self.hidden1 = nn.Linear(width, width)
        self.hidden2 = nn.Linear(width, width)
        self.last = nn.Linear(width, _CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.hidden1(x))
        x = torch.relu(self.hidden2(x))
        return self.last(x)  # type: ignore[no-any-return]


def _network(width: int) -> _Network:
    model = _Network(width)
    for layer in (model.first, model.hidden1, model.hidden2, model.last):
        nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.in_features))
    for layer in (model.first, model.hidden1, model.hidden2):
        nn.init.zeros_(layer.bias)
    return model


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rule = torch.randn(_INPUTS, _CLASSES, generator=generator)
    inputs = [torch.randn(_BATCH, _INPUTS, generator=generator) for _ in range(64)]
    return [(x, (x @ rule).argmax(-1)) for x in inputs]
