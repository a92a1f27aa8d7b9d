"""Untidy trainings, and ways for them to go wrong at one step: what the flight recorder is tried on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + self.mask[: x.shape[1], : x.shape[1]]
        return self.proj(scores.softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln(x)))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Returns logits and loss, as nanoGPT does; tied weights, dropout, a mask of infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block(16, 0.2) for _ in range(2))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CNN(nn.Module):
    """Batch norm, dropout, an in-place ReLU, a counter of its own, a scale that only it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.act, self.drop, self.fc = nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.Linear(6, 4)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.abs().mean()
        h = self.drop(self.act(self.bn(self.conv(x)))).mean((2, 3))
        return self.fc(h) * (1 + 0.001 * self.calls) + 0.01 * self.seen


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        hidden, _ = self.rnn(x * scale)
        return {"logits": self.out(hidden[:, -1]), "hidden": hidden}


@dataclass
class Plan:
    """What goes wrong. ``module`` and ``how`` are for hooks; the loop itself sees to the rest."""

    step: int
    how: str
    module: str = ""
    now: int = field(default=-1)  # the step that the training is in


class Poison(torch.autograd.Function):
    """Nothing in the forward, one NaN in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.clone()
        grad.view(-1)[grad.numel() // 2] = math.nan
        return grad


def plant(model: nn.Module, plan: Plan) -> None:
    """Have one module go wrong at one step."""
    if not plan.module:
        return

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if plan.now != plan.step:
            return None
        first = output[0] if isinstance(output, tuple) else output
        if plan.how == "forward nan":
            changed = first / torch.where(torch.arange(first.numel()).view_as(first) == 3, 0.0, 1.0)
            changed = changed - changed + changed  # an infinity, then a NaN of it
        elif plan.how == "forward inf":
            changed = first * 1e38 * 1e3
        elif plan.how == "backward nan":
            changed = Poison.apply(first)
        elif plan.how == "square root":
            changed = first + (first - first).pow(2).sum(-1, keepdim=True).sqrt()
        elif plan.how == "half":
            changed = (first.half() * 60000.0).float()
        else:
            raise AssertionError(plan.how)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    model.get_submodule(plan.module).register_forward_hook(hook)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": GPT, "cnn": CNN, "lstm": LSTM}


def batch(name: str) -> tuple[Any, ...]:
    if name == "gpt":
        return torch.randint(11, (3, 8)), torch.randint(11, (3, 8))
    if name == "cnn":
        return torch.randn(4, 3, 6, 6), torch.randint(4, (4,))
    return torch.randn(3, 7, 5), torch.randint(2, (3,))


def loss_of(name: str, model: nn.Module, data: tuple[Any, ...]) -> Tensor:
    if name == "gpt":
        return model(*data)[1]  # type: ignore[no-any-return]
    if name == "lstm":
        seen = model(data[0], scale=0.5)
        return F.cross_entropy(seen["logits"], data[1]) + 0.01 * seen["hidden"].pow(2).mean()
    return F.cross_entropy(model(data[0]), data[1])
