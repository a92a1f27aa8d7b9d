"""The model and the data of the demo: a small character GPT and a few kilobytes of text. No torchtap in here."""

from __future__ import annotations

from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SmallGPT", "Text"]


class Text:
    """The text that ships with the package, as characters."""

    def __init__(self, seed: int = 0) -> None:
        text = (files("torchtap.cli") / "data" / "demo.txt").read_text(encoding="utf-8").replace("\n", " ")
        self.alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self._tokens = torch.tensor([index[character] for character in text])
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Random windows and what follows each of their characters."""
        starts = torch.randint(len(self._tokens) - length - 1, (size,), generator=self._generator)
        windows = torch.stack([self._tokens[start : start + length + 1] for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.alphabet[token] for token in tokens.tolist())


class Attention(nn.Module):
    """Causal self-attention through torch's fused kernel: its maps never exist unless somebody asks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class SmallGPT(nn.Module):
    def __init__(
        self, characters: int, length: int = 64, width: int = 64, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
