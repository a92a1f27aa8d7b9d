"""Ports: pairs of models that compute the same with other names, other classes and other layouts.

Each pair is a reference and a function that makes its port, with the weights carried over. Faults are planted into
the port; the comparison has to name the reference's module for it, without any rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from tests.corpus.planted_zoo import build
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PORTS", "Port", "make_port"]


@final
@dataclass(frozen=True)
class Port:
    """A port of a reference, and which of its modules is which of the reference's."""

    reference: nn.Module
    target: nn.Module
    inputs: Any
    names: dict[str, str]  # module of the port -> module of the reference


class NanoAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (p.view(batch, tokens, self.heads, -1).transpose(1, 2) for p in self.qkv(x).split(width, 2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_a = nn.LayerNorm(width)
        self.attention = NanoAttention(width, heads)
        self.norm_b = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_a(x))
        return x + self.out(F.gelu(self.fc(self.norm_b(x)), approximate="tanh"))


class NanoGPT(nn.Module):
    def __init__(self, words: int, places: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(words, width)
        self.pos = nn.Embedding(places, width)
        self.stack = nn.ModuleList(NanoBlock(width, heads) for _ in range(layers))
        self.final = nn.LayerNorm(width)
        self.out = nn.Linear(width, words, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tok(input_ids) + self.pos(torch.arange(input_ids.shape[1]))
        for block in self.stack:
            x = block(x)
        return self.out(self.final(x))


class HandNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain


class HandBlock(nn.Module):
    """A Llama layer with its query, key and value in one projection, and gate and up in another."""

    def __init__(self, width: int, inner: int, heads: int, groups: int, eps: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.fused = heads, groups, width // heads, fused
        self.before = HandNorm(width, eps)
        if fused:
            self.wqkv = nn.Linear(width, width + 2 * groups * self.size, bias=False)
        else:
            self.wq = nn.Linear(width, width, bias=False)
            self.wk = nn.Linear(width, groups * self.size, bias=False)
            self.wv = nn.Linear(width, groups * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.after = HandNorm(width, eps)
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.before(x)
        sizes = [self.heads * self.size, self.groups * self.size, self.groups * self.size]
        q, k, v = self.wqkv(y).split(sizes, -1) if self.fused else (self.wq(y), self.wk(y), self.wv(y))
        q, k, v = (p.unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (q, k, v))
        q, k = (p * cos + _turned(p) * sin for p in (q, k))
        k, v = (p.repeat_interleave(self.heads // self.groups, 1) for p in (k, v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.wo(z)
        y = self.after(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def _turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


class HandLlama(nn.Module):
    def __init__(self, config: Any, fused: bool) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.blocks = nn.ModuleList(
            HandBlock(
                width, config.intermediate_size, heads, config.num_key_value_heads, config.rms_norm_eps, fused
            )
            for _ in range(config.num_hidden_layers)
        )
        self.last = HandNorm(width, config.rms_norm_eps)
        self.unembed = nn.Linear(width, config.vocab_size, bias=False)
        self.size = width // heads

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], dtype=torch.float32)
        rates = 10000.0 ** (-torch.arange(0, self.size, 2, dtype=torch.float32) / self.size)
        angles = torch.outer(places, rates)
        angles = torch.cat([angles, angles], -1)
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.unembed(self.last(x))


class TorchvisionBlock(nn.Module):
    """A ViT layer as torchvision has it: `nn.MultiheadAttention` and one `nn.Sequential` for the rest."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(0.0),
            nn.Linear(2 * width, width),
            nn.Dropout(0.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class TorchvisionViT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, classes: int, patches: int) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, 4, 4)
        self.pos = nn.Parameter(torch.zeros(1, patches, width))
        self.encoder = nn.Sequential(*(TorchvisionBlock(width, heads) for _ in range(layers)))
        self.ln = nn.LayerNorm(width)
        self.heads = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv_proj(images).flatten(2).transpose(1, 2) + self.pos
        return self.heads(self.ln(self.encoder(x)).mean(1))


def _gpt2() -> Port:
    reference, inputs = build("gpt2")
    config: Any = reference.config
    port = NanoGPT(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head)
    names = {
        "tok": "transformer.wte",
        "pos": "transformer.wpe",
        "final": "transformer.ln_f",
        "out": "lm_head",
    }
    for n in range(config.n_layer):
        mine, theirs = f"stack.{n}", f"transformer.h.{n}"
        names |= {
            f"{mine}.norm_a": f"{theirs}.ln_1",
            f"{mine}.attention": f"{theirs}.attn",
            f"{mine}.attention.qkv": f"{theirs}.attn.c_attn",
            f"{mine}.attention.proj": f"{theirs}.attn.c_proj",
            f"{mine}.norm_b": f"{theirs}.ln_2",
            f"{mine}.fc": f"{theirs}.mlp.c_fc",
            f"{mine}.out": f"{theirs}.mlp.c_proj",
            mine: theirs,
        }
    _carry(reference, port, names)
    return Port(reference, port.eval(), (inputs["input_ids"],), names)


def _llama(fused: bool) -> Port:
    reference, inputs = build("llama")
    config: Any = reference.config
    port: Any = HandLlama(config, fused)
    names = {"embedding": "model.embed_tokens", "last": "model.norm", "unembed": "lm_head"}
    for n in range(config.num_hidden_layers):
        mine, theirs = f"blocks.{n}", f"model.layers.{n}"
        names |= {
            f"{mine}.before": f"{theirs}.input_layernorm",
            f"{mine}.wo": f"{theirs}.self_attn.o_proj",
            f"{mine}.after": f"{theirs}.post_attention_layernorm",
            f"{mine}.w1": f"{theirs}.mlp.gate_proj",
            f"{mine}.w3": f"{theirs}.mlp.up_proj",
            f"{mine}.w2": f"{theirs}.mlp.down_proj",
            mine: theirs,
        }
        if not fused:
            names |= {f"{mine}.w{letter}": f"{theirs}.self_attn.{letter}_proj" for letter in "qkv"}
    _carry(reference, port, names)
    if fused:
        with torch.no_grad():
            for n, block in enumerate(port.blocks):
                attention = reference.get_submodule(f"model.layers.{n}.self_attn")
                parts = [getattr(attention, f"{letter}_proj").weight for letter in "qkv"]
                block.wqkv.weight.copy_(torch.cat(parts))
                names[f"blocks.{n}.wqkv"] = f"model.layers.{n}.self_attn.q_proj+k_proj+v_proj"
    return Port(reference, port.eval(), (inputs["input_ids"],), names)


def _vit() -> Port:
    reference, inputs = build("timm ViT")
    model: Any = reference
    port = TorchvisionViT(48, 4, 4, 10, 16)
    names = {"conv_proj": "patch_embed.proj", "ln": "norm", "heads": "head"}
    with torch.no_grad():
        port.pos.copy_(model.pos_embed)
        for n, block in enumerate(model.blocks):
            mine: Any = port.encoder[n]
            mine.self_attention.in_proj_weight.copy_(block.attn.qkv.weight)
            mine.self_attention.in_proj_bias.copy_(block.attn.qkv.bias)
            mine.self_attention.out_proj.weight.copy_(block.attn.proj.weight)
            mine.self_attention.out_proj.bias.copy_(block.attn.proj.bias)
    for n in range(4):
        mine_path, theirs = f"encoder.{n}", f"blocks.{n}"
        names |= {
            f"{mine_path}.ln_1": f"{theirs}.norm1",
            f"{mine_path}.ln_2": f"{theirs}.norm2",
            f"{mine_path}.mlp.0": f"{theirs}.mlp.fc1",
            f"{mine_path}.mlp.3": f"{theirs}.mlp.fc2",
            mine_path: theirs,
        }
    _carry(reference, port, names)
    return Port(
        reference,
        port.eval(),
        inputs,
        names | {f"encoder.{n}.self_attention": f"blocks.{n}.attn" for n in range(4)},
    )


def _split_gpt() -> Port:
    """The other way round: the reference has one projection, the port three."""
    fused = _llama(fused=True)
    plain = _llama(fused=False)
    names = {
        mine: fused_name
        for mine, original in plain.names.items()
        for fused_name, other in fused.names.items()
        if other == original
    }
    for n in range(3):
        names |= {f"blocks.{n}.w{letter}": f"blocks.{n}.wqkv" for letter in "qkv"}
    return Port(fused.target, plain.target, plain.inputs, names)


def _carry(reference: nn.Module, port: nn.Module, names: dict[str, str]) -> None:
    """Copy the weights; a `Conv1D` keeps its transposed."""
    with torch.no_grad():
        for mine, theirs in names.items():
            target, source = port.get_submodule(mine), reference.get_submodule(theirs)
            for name, parameter in target.named_parameters(recurse=False):
                value = dict(source.named_parameters(recurse=False)).get("weight" if name == "gain" else name)
                if value is not None:
                    turned = type(source).__name__ == "Conv1D" and value.dim() == 2
                    parameter.copy_(value.t() if turned else value)


PORTS: dict[str, Callable[[], Port]] = {
    "GPT-2 and a nanoGPT": _gpt2,
    "Llama and a hand-written one": lambda: _llama(fused=False),
    "Llama and one with fused QKV": lambda: _llama(fused=True),
    "fused and split QKV": _split_gpt,
    "ViT as timm and as torchvision": _vit,
}


def make_port(name: str) -> Port:
    """One of the ports, with its weights carried over."""
    return PORTS[name]()
