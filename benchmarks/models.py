"""The two models of the tables: one where arithmetic dominates, one that is nothing but overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "Training", "gpt2_training", "gpt_training", "hooked", "mlp", "mlp_training"]

Hook = Callable[[nn.Module, Any, Tensor], None]


@contextmanager
def hooked(*hooks: tuple[Iterable[nn.Module], Hook]) -> Iterator[None]:
    """Forward hooks by hand on modules, as long as the block lasts."""
    handles = [module.register_forward_hook(hook) for modules, hook in hooks for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = _Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


@final
class GPT(nn.Module):
    """A decoder of the usual shape."""

    def __init__(self, layers: int = 12, width: int = 384, heads: int = 6, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp(layers: int = 50, width: int = 256) -> nn.Sequential:
    """Linear and ReLU in turn."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


@final
class Training:
    """A model, an optimizer and one batch. Learning changes no cost, so the rate is next to nothing."""

    def __init__(self, model: nn.Module, inputs: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
        self.model = model
        self.inputs = inputs
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
        self.loss = loss

    def step(self, call: Callable[[Tensor], Tensor] | None = None) -> None:
        """Forward, backward, update; ``call`` is what to call in place of the model."""
        output = self.model(self.inputs) if call is None else call(self.inputs)
        self.loss(output).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def glance(self) -> None:
        """Forward and backward of one sample: every module is met, at next to no cost."""
        self.model(self.inputs[:1]).sum().backward()
        self.optimizer.zero_grad()


def gpt_training(layers: int = 12, width: int = 384, length: int = 128, batch: int = 8) -> Training:
    torch.manual_seed(0)
    model = GPT(layers, width, max(1, width // 64))
    tokens = torch.randint(0, 1024, (batch, length + 1))
    targets = tokens[:, 1:].reshape(-1)
    return Training(model, tokens[:, :-1], lambda logits: F.cross_entropy(logits.flatten(0, 1), targets))


class _Logits(nn.Module):
    """A Hugging Face model that returns nothing but its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


def gpt2_training(length: int = 256, batch: int = 2, vocabulary: int = 8192, layers: int = 12) -> Training:
    """GPT-2 as people have it: 12 layers of width 768, from Hugging Face."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"vocab_size": vocabulary, "n_positions": length, "n_layer": layers}
    model = _Logits(GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)))
    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    targets = tokens[:, 1:].reshape(-1)
    return Training(model, tokens[:, :-1], lambda logits: F.cross_entropy(logits.flatten(0, 1), targets))


def mlp_training(layers: int = 50, width: int = 256, batch: int = 32) -> Training:
    torch.manual_seed(0)
    return Training(mlp(layers, width), torch.randn(batch, width), lambda y: y.square().mean())
