"""Small models of four families and data that they can learn, drawn anew at each step unless said otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "CNN",
    "GPT",
    "LSTM",
    "MLP",
    "VOCABULARY",
    "Attention",
    "Batches",
    "images",
    "points",
    "tokens",
]

CLASSES, WIDTH, VOCABULARY, TIME = 4, 16, 31, 16
Batches = Callable[[int], tuple[Tensor, Tensor]]


class MLP(nn.Module):
    """Layers of one width with an activation between them."""

    def __init__(self, depth: int = 3, hidden: int = 64, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        sizes = [WIDTH, *[hidden] * (depth - 1)]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))
        self.activations = nn.ModuleList(activation() for _ in self.layers)
        self.head = nn.Linear(sizes[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = activation(layer(x))
        return self.head(x)


class CNN(nn.Module):
    """Two convolutions with batch norm, dropout, and a head."""

    def __init__(self, norm: bool = True, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1: nn.Module = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2: nn.Module = nn.BatchNorm2d(16) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(16 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.adaptive_avg_pool2d(F.relu(self.bn2(self.conv2(x))), 4)
        return self.fc(self.drop(x.flatten(1)))


class Attention(nn.Module):
    """Self-attention by torch's function, or by hand."""

    def __init__(
        self, width: int, heads: int, *, causal: bool = True, scaled: bool = True, by_hand: bool = False
    ) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.heads, self.causal, self.by_hand = heads, causal, by_hand
        self.scale = 1 / math.sqrt(width // heads) if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            each.view(b, t, self.heads, c // self.heads).transpose(1, 2) for each in self.qkv(x).split(c, 2)
        )
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) * self.scale
            if self.causal:
                scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
            y = F.softmax(scores, dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, **options: bool) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, **options)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """Two blocks, learned positions, weights tied or not."""

    def __init__(
        self, *, width: int = 64, heads: int = 2, tied: bool = False, dropout: float = 0.0, **options: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Parameter(torch.zeros(TIME, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, **options) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embedding(ids) + self.positions[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LSTM(nn.Module):
    """A recurrent classifier of token sequences: the state after the last token, or at the last that is no padding."""

    def __init__(self, *, masked: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True)
        self.fc = nn.Linear(48, CLASSES)
        self.masked = masked

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(ids))
        if self.masked:
            last = (ids != 0).sum(1).clamp_min(1) - 1
            return self.fc(states[torch.arange(len(ids)), last])
        return self.fc(states.mean(1))


def points(seed: int, size: int = 64, noise: float = 0.0) -> Batches:
    """Points whose class a linear rule tells."""
    rule = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(seed))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(size, WIDTH, generator=make)
        return x, (x @ rule).argmax(1)

    return batch


def images(seed: int, size: int = 32) -> Batches:
    """Noise with a bright quarter, which is the class."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(1000 * seed + step)
        x = 0.5 * torch.randn(size, 1, 12, 12, generator=make)
        y = torch.randint(0, CLASSES, (size,), generator=make)
        for i, label in enumerate(y.tolist()):
            row, column = divmod(label, 2)
            x[i, :, 6 * row : 6 * row + 6, 6 * column : 6 * column + 6] += 1
        return x, y

    return batch


def tokens(seed: int, size: int = 16) -> Batches:
    """Counting sequences with a step of one to three: inputs, and the same shifted by one."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(1000 * seed + step)
        start = torch.randint(0, VOCABULARY, (size, 1), generator=make)
        pace = torch.randint(1, 4, (size, 1), generator=make)
        ids = (start + pace * torch.arange(TIME + 1)) % VOCABULARY
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


def texts(seed: int, size: int = 32) -> Batches:
    """Sequences of different lengths, padded with token 0; the class is that of the first token."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(1000 * seed + step)
        ids = torch.randint(1, VOCABULARY, (size, TIME), generator=make)
        y = ids[:, 0] % CLASSES
        lengths = torch.randint(4, TIME, (size, 1), generator=make)
        return ids.masked_fill(torch.arange(TIME) >= lengths, 0), y

    return batch


def forever(batches: Batches, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of so many steps."""
    for step in range(steps):
        yield batches(step)
