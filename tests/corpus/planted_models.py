"""Small models of four families for planting faults into. Each has six like layers and trained-looking weights.

Every family has the same places to go wrong: a norm, an activation, a residual or gate, a buffer, a mask.
Faults are planted from outside (`planted_faults`); nothing here knows of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FAMILIES", "build"]

LAYERS = 6


class Attention(nn.Module):
    """Multi-head attention with its arithmetic in plain sight."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = self.scale(q @ k.transpose(-2, -1), q.shape[-1])
        weights = self.masked(scores, mask).softmax(-1)
        return self.out(self.merge(weights @ v))

    def scale(self, scores: Tensor, size: int) -> Tensor:
        return scores / math.sqrt(size)

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(~mask, float("-inf"))

    def merge(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(2)


class Rotation(nn.Module):
    """Mixes in the position by a buffer, as rotary caches and position tables do."""

    table: Tensor

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(tokens).float(), 0.5 ** torch.arange(width).float())
        self.register_buffer("table", angles.cos())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table[: x.shape[1]]


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.act = nn.GELU()
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class GptBlock(nn.Module):
    """Norm first, then the branch, then the residual."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.rotation = Rotation(width, tokens)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.join(x, self.attn(self.rotation(self.norm1(x)), mask))
        return x + self.mlp(self.norm2(x))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch


class BertBlock(nn.Module):
    """The branch first, then the residual and the norm."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.rotation = Rotation(width, tokens)
        self.attn = Attention(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = FeedForward(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(self.join(x, self.attn(self.rotation(x), mask)))
        return self.norm2(x + self.mlp(x))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch


class Transformer(nn.Module):
    def __init__(
        self, block: type[nn.Module], causal: bool, width: int = 48, heads: int = 4, words: int = 97
    ) -> None:
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(block(width, heads, 24) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        mask = self.mask(tokens, lengths)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def mask(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        if self.causal:
            return (places[:, None] >= places[None, :])[None, None]
        return (places[None, :] < lengths[:, None])[:, None, None]


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.act = nn.GELU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        return F.relu(self.join(x, branch))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch


class Convolutional(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(LAYERS))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class RecurrentBlock(nn.Module):
    """A one-layer LSTM between a norm and a gated residual; padded steps are held at zero by the mask."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rotation = Rotation(width, tokens)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.act = nn.GELU()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.rotation(self.norm(x)))
        return self.join(x, self.proj(self.act(self.scale(self.masked(hidden, mask)))))

    def masked(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden * mask[..., None]

    def scale(self, hidden: Tensor) -> Tensor:
        return hidden * 4.0

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch


class Recurrent(nn.Module):
    def __init__(self, width: int = 32, words: int = 97) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(RecurrentBlock(width, 24) for _ in range(LAYERS))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(tokens.shape[1])[None, :] < lengths[:, None]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


FAMILIES = ("GPT", "BERT", "CNN", "LSTM")


def build(family: str, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of a family in eval mode, with weights and statistics away from their initial values, and its inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module
        if family == "CNN":
            model = Convolutional()
        elif family == "LSTM":
            model = Recurrent()
        else:
            model = Transformer(GptBlock if family == "GPT" else BertBlock, causal=family == "GPT")
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.uniform_(-0.3, 0.3)
                if isinstance(module, nn.BatchNorm2d):
                    assert module.running_mean is not None
                    assert module.running_var is not None
                    module.running_mean.uniform_(-0.3, 0.3)
                    module.running_var.uniform_(0.5, 1.5)
        if family == "CNN":
            return model.eval(), (torch.randn(3, 3, 12, 12),)
        return model.eval(), (torch.randint(0, 97, (3, 20)), torch.tensor([20, 14, 17]))
