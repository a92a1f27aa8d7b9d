"""Faults of architecture and initialisation (C)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.kit import Case, Kit, sequence_loss
from tests.corpus.diagnosis.models import CNN, GPT, MLP, images, points, tokens
from torch import Tensor, nn

__all__ = ["CASES"]


def constant_init(kit: Kit) -> None:
    model = MLP()
    if kit.sick:
        for layer in [*model.layers, model.head]:
            nn.init.constant_(layer.weight, 0.05)
            nn.init.zeros_(layer.bias)
    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.05), points(kit.seed), 12)


def init_ten_times(kit: Kit) -> None:
    model = MLP(depth=4)
    if kit.sick:
        with torch.no_grad():
            for layer in model.layers:
                layer.weight.mul_(10)
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 12)


def deep_sigmoids(kit: Kit) -> None:
    model = MLP(depth=9, activation=nn.Sigmoid if kit.sick else nn.GELU)
    if not kit.sick:
        for layer in model.layers:
            nn.init.kaiming_normal_(layer.weight)
    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.05), points(kit.seed), 12)


def dead_relus(kit: Kit) -> None:
    model = CNN(norm=False)
    if kit.sick:
        nn.init.constant_(model.conv2.bias, -10.0)
    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.05), images(kit.seed), 12)


def saturated_tanh(kit: Kit) -> None:
    model = MLP(activation=nn.Tanh)
    if kit.sick:
        nn.init.normal_(model.layers[1].weight, std=8.0)
    kit.fit(model, torch.optim.SGD(model.parameters(), lr=0.01), points(kit.seed), 12)


class Softmaxed(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(super().forward(x), dim=-1)


def softmax_twice(kit: Kit) -> None:
    model = Softmaxed() if kit.sick else MLP()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 12)


def no_causal_mask(kit: Kit) -> None:
    model = GPT(causal=not kit.sick, by_hand=kit.seed % 2 == 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kit.fit(model, optimizer, tokens(kit.seed), 12, loss=sequence_loss)


def unscaled_attention(kit: Kit) -> None:
    model = GPT(width=128, heads=1, scaled=not kit.sick, by_hand=kit.seed % 2 == 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kit.fit(model, optimizer, tokens(kit.seed), 12, loss=sequence_loss)


def growing_logits(kit: Kit) -> None:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2 if kit.sick else 3e-3, weight_decay=0.0)
    kit.fit(model, optimizer, tokens(kit.seed), 150, loss=sequence_loss)


def broken_tie(kit: Kit) -> None:
    model = GPT(tied=True)
    if kit.sick:
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kit.fit(model, optimizer, tokens(kit.seed), 12, loss=sequence_loss)


class Listed(nn.Module):
    """Layers in a plain list."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        layers = [nn.Linear(16, 16) for _ in range(2)]
        self.hidden = nn.ModuleList(layers) if registered else layers
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.head(x)


def module_in_a_list(kit: Kit) -> None:
    model = Listed(not kit.sick)
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), points(kit.seed), 12)


class Forgetful(CNN):
    """Has a second head that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(16, 16)


def never_called(kit: Kit) -> None:
    model = Forgetful() if kit.sick else CNN()
    kit.fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3), images(kit.seed), 12)


CASES = [
    Case("C1", "constant initialisation", constant_init, ("equal-rows",), ("layers",), 0),
    Case("C2", "initialisation × 10", init_ten_times, ("init-too-large",), ("layers.0",), 0),
    Case("C3", "deep sigmoids", deep_sigmoids, ("vanishing",), ("layers.0",), 0),
    Case("C4", "dead ReLUs", dead_relus, ("dead-units",), ("conv",), 0),
    Case("C5", "saturated tanh", saturated_tanh, ("saturated",), ("activations.1",), 0),
    Case("C6", "softmax before cross-entropy", softmax_twice, ("probabilities-as-logits",), (":output",), 0),
    Case("C9", "no causal mask", no_causal_mask, ("sees-the-future",), ("attn",), 0, compiles=False),
    Case(
        "C10", "attention not scaled", unscaled_attention, ("sharp-attention",), ("attn",), 0, compiles=False
    ),
    Case(
        "C11",
        "growing logits",
        growing_logits,
        ("growing-logits", "attention-collapse"),
        (":output", "attn"),
        50,
    ),
    Case("C12", "broken tie", broken_tie, ("untied",), ("head",), 0),
    Case("C13", "modules in a list", module_in_a_list, ("hidden-module",), ("hidden",), 0),
    Case("C14", "never called", never_called, ("never-called",), ("extra",), 0),
]
