"""Real trainings for the viewer's tests, screenshots and report: a small transformer on small text."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchtap as tt

__all__ = ["TEXT", "Transformer", "small_run", "tokens_of_batch", "train"]

TEXT = (
    "the tap opens and the numbers run from layer to layer , and where one of them goes wrong "
    "the next ones follow ; so look at the first , not at the last , and you will find the cause . "
) * 8
WORDS = sorted(set(TEXT.split()))


class Attention(nn.Module):
    """Causal self-attention over a few heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    """Two layers; ``gain`` stands for the one number that goes wrong."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.ReLU()
        self.down = nn.Linear(4 * width, width)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)) * self.gain)


class Block(nn.Module):
    """Attention and an MLP; without the residual path gradients fade behind it."""

    def __init__(self, width: int, heads: int, *, residual: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        if self.residual:
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        return self.mlp(self.attn(x))


class Transformer(nn.Module):
    """Predicts the next word."""

    def __init__(self, *, layers: int = 2, width: int = 32, heads: int = 4, plain: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), width)
        self.place = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads, residual=i >= plain) for i in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(WORDS), bias=False)
        for part in self.blocks[:plain]:
            for module in part.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.35 / math.sqrt(module.in_features))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.place(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens_of_batch(length: int) -> list[str]:
    """The words of the first example of every batch."""
    return TEXT.split()[:length]


def train(
    folder: Path | str,
    *,
    steps: int = 30,
    layers: int = 2,
    width: int = 32,
    plain: int = 0,
    length: int = 12,
    seed: int = 0,
    rate: float = 3e-3,
    breaks_at: int | None = None,
    taps: list[Any] | None = None,
    dead: bool = False,
    gain: float = 1.0,
    labels: dict[str, Any] | None = None,
    each_step: Callable[[int, Any], None] | None = None,
) -> Path:
    """Train and record. From step ``breaks_at`` on one MLP multiplies with infinity."""
    torch.manual_seed(seed)
    model = Transformer(layers=layers, width=width, plain=plain)
    if dead:
        nn.init.constant_(model.blocks[layers // 2].mlp.up.bias, -30.0)
    model.blocks[layers * 7 // 12].mlp.gain = gain
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    words = torch.tensor([WORDS.index(word) for word in TEXT.split()])
    chosen = taps or [
        tt.tap("*:output", keep=tt.Stats()),
        tt.tap("*:grad_output", keep=tt.Stats()),
        tt.tap("*:param_grad", keep=tt.Stats()),
        tt.tap("*:param", keep=tt.Stats()),
        tt.tap("blocks.*.attn:attention", keep=tt.Full(), every=max(1, steps // 6)),
        tt.tap("blocks.*:output", keep=tt.Full(), every=max(1, steps // 6)),
        tt.tap("blocks.*.mlp.down:output", keep=tt.Histogram(), every=max(1, steps // 60)),
    ]
    noted = {"tokens": tokens_of_batch(length), "lr": rate, "layers": layers, **(labels or {})}
    with tt.watch(model, folder, chosen, labels=noted) as watch:
        for step in range(steps):
            if breaks_at is not None and step >= breaks_at:
                model.blocks[layers * 7 // 12].mlp.gain = math.inf
            starts = torch.randint(0, len(words) - length - 1, (7,)).tolist()
            rows = torch.stack([words[s : s + length + 1] for s in [0, *starts]])
            with watch.step(step):
                loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                watch.log("loss", loss)
            if each_step is not None:
                each_step(step, watch)
    return Path(folder)


def small_run(
    folder: Path,
    *,
    steps: int = 20,
    labels: dict[str, Any] | None = None,
    scale: float = 1.0,
    sites: tuple[str, ...] = ("a:output", "b:output"),
    close: bool = True,
    values: int = 1,
) -> Any:
    """Write a run of made-up numbers: a loss that falls, ``values - 1`` others that rise, the size of each site."""
    from torchtap.store.record import ScalarBlock, StepRecord
    from torchtap.store.write.writer import RunWriter

    writer = RunWriter(folder, manifest={"created": "2026-01-02T03:04:05+00:00", "labels": labels or {}})
    for step in range(steps):
        sizes = np.array([[scale * (1 + row) * (1 + step)] * 2 for row in range(len(sites))])
        loss = np.array([[scale * (2.0 + 3.0 * math.exp(-step / 6) + 0.1 * math.sin(step))]])
        logged = (":value.loss", *(f":value.metric_{number}" for number in range(values - 1)))
        numbers = np.concatenate([loss, np.full((values - 1, 1), float(step))])
        blocks = (ScalarBlock(sites, ("rms", "std"), sizes), ScalarBlock(logged, ("value",), numbers))
        writer.write(StepRecord(step, step // 5, None, "train", 1000.0 + 2.0 * step, blocks, ()))
    if close:
        writer.close()
        return None
    writer.flush()
    return writer
