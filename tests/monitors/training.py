"""A small Transformer with the layers that monitors are asked about, and a real training of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, LENGTH, VOCABULARY = 16, 6, 11


class Attention(nn.Module):
    """Scores as a module of their own, so that its output is one map a call."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.weights = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.weights(q @ k.transpose(-1, -2) / WIDTH**0.5) @ v


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.attention = Attention()
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x, x, x)[0]
        x = x + self.cross_attn(x, x, x, need_weights=False)[0]
        x = x + self.attention(x)
        return x + self.ffn(x)


class Transformer(nn.Module):
    """``transformer.encoder.layers.0.self_attn`` and its like."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        encoder = nn.Module()
        encoder.layers = nn.ModuleList(Layer() for _ in range(2))
        self.transformer = nn.Module()
        self.transformer.encoder = encoder
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.transformer.encoder.layers:
            x = layer(x)
        return self.head(x)


FFN = "transformer.encoder.layers.0.ffn"
SELF_ATTENTION = "transformer.encoder.layers.0.self_attn"
CROSS_ATTENTION = "transformer.encoder.layers.0.cross_attn"
WEIGHTS = "transformer.encoder.layers.0.attention.weights"

# Layers of both record types, each under an alias.
MIXED = {
    SELF_ATTENTION: {"alias": "attention", "record_type": "single"},
    WEIGHTS: {"alias": "maps", "record_type": "single"},
    FFN: {"alias": "ffn", "record_type": "epoch_full"},
}


def setting(batches: int = 4, batch_size: int = 3) -> SimpleNamespace:
    """A model, its data and optimizer; the same each time."""
    torch.manual_seed(0)
    model = Transformer()
    tokens = torch.randint(0, VOCABULARY, (batches * batch_size, LENGTH))
    loader = DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, loader=loader, optimizer=optimizer, batches=batches)


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def train(
    training: SimpleNamespace,
    epochs: int,
    *,
    epoch_callback: Callable[[int], None] = lambda _: None,
    batch_callback: Callable[[int], None] = lambda _: None,
) -> Iterator[int]:
    """Train; yields each epoch's number when it is over."""
    for epoch in range(1, epochs + 1):
        epoch_callback(epoch)
        for index, (tokens, targets) in enumerate(training.loader):
            batch_callback(index)
            loss = criterion(training.model(tokens), targets)
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
        yield epoch


def outputs_of(layer: str, epoch: int) -> list[Any]:
    """The layer's outputs in that epoch of the same training, by a plain hook."""
    training, found = setting(), []
    handle = training.model.get_submodule(layer).register_forward_hook(lambda *a: found.append(a[2]))
    for done in train(training, epoch):
        if done < epoch:
            found.clear()
    handle.remove()
    return found
