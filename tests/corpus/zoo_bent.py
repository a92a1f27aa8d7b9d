"""Architectures in the styles of others (timm, torchvision, peft …), and with the habits that real code has.

Side values on ``self``, outputs in dataclasses and nested dictionaries, experts by ``index_add``, recurrent cells in
loops, parametrizations, functions of one's own, precision by region.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

__all__ = ["BENT"]

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class _SparseExperts(nn.Module):
    """Each token goes to two experts, by mask and ``index_add_``; the load is kept on ``self``."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4, bias=False), nn.ModuleList([_Expert() for _ in range(4)])
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        logits = self.router(flat)
        weights, chosen = torch.topk(logits.softmax(-1), 2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(flat)
        share = F.one_hot(chosen, 4).to(flat.dtype) * weights.unsqueeze(-1)
        self.load = share.sum((0, 1))
        for number, expert in enumerate(self.experts):
            result.index_add_(
                0, torch.arange(flat.shape[0]), expert(flat) * share.sum(1)[:, number : number + 1]
            )
        return result.reshape(x.shape), logits


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe, self.head = nn.LayerNorm(8), _SparseExperts(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed, logits = self.moe(self.norm(x))
        return self.head(x + mixed), logits


class _Cells(nn.Module):
    """Recurrent cells called in a loop; states in a list of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.cells = nn.ModuleList([nn.LSTMCell(8, 8), nn.LSTMCell(8, 8)])
        self.gate, self.head = nn.GRUCell(8, 8), nn.Linear(8, 40)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = self.embed(tokens)
        states = [(x.new_zeros(x.shape[0], 8), x.new_zeros(x.shape[0], 8)) for _ in self.cells]
        slow = x.new_zeros(x.shape[0], 8)
        outputs = []
        for step in range(tokens.shape[1]):
            y = x[:, step]
            for level, cell in enumerate(self.cells):
                states[level] = cell(y, states[level])
                y = states[level][0]
            slow = self.gate(y, slow)
            outputs.append(self.head(slow))
        return torch.stack(outputs, 1), states


@dataclass
class Heads:
    """What `_Nested` returns."""

    logits: Tensor
    hidden: dict[str, Any]
    loss: Tensor | None = None


class Pair(NamedTuple):
    """Mean and spread."""

    mean: Tensor
    spread: Tensor


class _Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Pair:
        spread = self.spread(x).exp()  # made first, returned second
        return Pair(self.mean(x), spread)


class _Nested(nn.Module):
    """A variational encoder that returns a dataclass with nested dictionaries and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
        self.latent, self.decode = _Gaussian(), nn.Linear(4, 8)

    def forward(self, batch: dict[str, Tensor]) -> Heads:
        h = self.encode(batch["x"] * batch["mask"].unsqueeze(-1))
        latent = self.latent(h)
        logits = self.decode(latent.mean + 0.5 * latent.spread)
        return Heads(logits, {"latent": latent, "levels": [h, (latent.mean * 2,)]}, logits.square().mean())


torch.utils._pytree.register_dataclass(Heads, serialized_type_name="tests.corpus.zoo_bent.Heads")


class _Round(torch.autograd.Function):
    """Straight-through rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class _Codebook(nn.Module):
    """Vector quantisation with a function of its own, the nearest code and a straight-through sum."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.fc = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.fc(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(-1)
        found = self.codes(nearest)
        rounded: Tensor = _Round.apply(z * 4) / 4  # type: ignore[no-untyped-call]
        return z + (found - z).detach() + rounded, nearest


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _parametrized() -> nn.Module:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8),
    )  # fmt: skip
    parametrize.register_parametrization(model[4], "weight", _Symmetric())
    return model


def _old_norms() -> nn.Module:
    return nn.Sequential(
        nn.utils.weight_norm(nn.Conv2d(3, 4, 3, padding=1)), nn.LeakyReLU(0.1),
        nn.utils.spectral_norm(nn.Conv2d(4, 4, 3, padding=1)), nn.Sigmoid(),
    )  # fmt: skip


class _LoraLinear(nn.Linear):
    """A linear layer that became another class, as adapters make it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, width, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.1)})
        self.active = ["default"]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = F.linear(x, self.weight, self.bias)
        for name in self.active:
            x = x.to(self.lora_A[name].weight.dtype)
            result = result + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * 2
        return result


class _Wrapper(nn.Module):
    """Holds the model, hands calls on, and looks attributes up in it."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["base_model"], name)


class _Mixed(nn.Module):
    """Regions of other precision and without gradients; a value is kept on ``self`` and used by another module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen, self.reader = _Seen(), _Reader()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = self.a(x).relu()
        with torch.autocast("cpu", torch.bfloat16):
            half = self.b(frozen)
            with torch.autocast("cpu", enabled=False):
                whole = self.c(half.float())
        y = self.seen(whole)
        return self.reader(y, self.seen)  # type: ignore[no-any-return]


class _Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.fc(x)  # read by others later
        return self.last.relu() + x


class _Reader(nn.Module):
    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        return x * other.last


class _Recomputed(nn.Module):
    """Checkpoints around a part with several arguments and results, and around a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.tail = _Gaussian(), nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = checkpoint(self.pair, x, use_reentrant=False)
        return checkpoint(self.tail, mean * spread, use_reentrant=False)  # type: ignore[no-any-return]


class _Tied(nn.Module):
    """Weights tied between an embedding and the head, a norm under two names, a list called in loops and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight
        self.steps = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)
        self.final = self.norm

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            for step in self.steps:
                x = x + step(self.norm(x)).tanh()
        for step in reversed(self.steps):
            x = x - step(x)
        return self.head(self.final(x))  # type: ignore[no-any-return]


class _Unused(nn.Module):
    """Results that nobody uses, an output that is an input, an output twice, a list that grows, None among outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.aux, self.main, self.same = nn.Linear(8, 2), nn.Linear(8, 8), nn.Identity()
        self.all = _Everything()

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.aux(x)
        y = self.main(x)
        first, second, nothing = self.all(y)
        return {"y": y, "again": y, "x": self.same(x), "pair": (first, second), "nothing": nothing, "n": 3}


class _Everything(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        kept = [x * scale for scale in (1.0, 2.0)]
        return kept[1], kept[0], None


class _InPlace(nn.Module):
    """In-place arithmetic on what modules return, on slices, and on a view of the input's copy."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, :4] *= 2
        y = self.a(x)
        y += 1
        z = self.relu(self.b(y))
        z.mul_(0.5).add_(y)
        return z.view(-1, 4, 2).transpose(1, 2)


class _Spectral(nn.Module):
    """Complex numbers, einsum, cumulative sums and a state space scan in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 8, dtype=torch.cfloat) * 0.1)
        self.proj, self.decay = nn.Linear(8, 8), nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(x, n=8, dim=1) * self.filter
        y = torch.fft.irfft(spectrum, n=8, dim=1)[:, : x.shape[1]]
        state, states = torch.zeros_like(x[:, 0]), []
        for step in self.proj(y).unbind(1):
            state = torch.sigmoid(self.decay) * state + step
            states.append(state)
        scanned = torch.stack(states, 1)
        return torch.einsum("btd,bsd->bts", scanned, y), spectrum


def _rows(count: int = 4) -> tuple[Tensor]:
    return (torch.randn(count, 8),)


def _images(size: int = 16) -> tuple[Tensor]:
    return (torch.randn(2, 3, size, size),)


def _tokens() -> tuple[Tensor]:
    return (torch.randint(0, 40, (2, 5)),)


def _steps() -> tuple[Tensor]:
    return (torch.randn(2, 5, 8),)


def _batch() -> tuple[dict[str, Tensor]]:
    return ({"x": torch.randn(4, 8), "mask": torch.tensor([1.0, 1.0, 0.0, 1.0])},)


def _of(make: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, ...]]) -> Callable[[], Built]:
    return lambda: (make(), inputs(), {})


BENT: dict[str, Callable[[], Built]] = {
    "sparse experts": _of(_Mixture, _steps),
    "cells": _of(_Cells, _tokens),
    "nested outputs": _of(_Nested, _batch),
    "codebook": _of(_Codebook, _rows),
    "parametrized": _of(_parametrized, _rows),
    "old norms": _of(_old_norms, _images),
    "adapters": _of(lambda: _Wrapper(nn.Sequential(_LoraLinear(8), nn.GELU(), _LoraLinear(8))), _rows),
    "mixed precision": _of(_Mixed, _rows),
    "recomputed": _of(_Recomputed, _rows),
    "tied": _of(_Tied, _tokens),
    "unused": _of(_Unused, _rows),
    "in place": _of(_InPlace, _rows),
    "spectral": _of(_Spectral, _steps),
}  # fmt: skip
