"""Commits on the sample project `golden_repository`: faults with the module that they are in, and harmless changes.

A commit edits the files of the repository as a person would. ``HELD_OUT`` lists the tests whose commits were not
looked at while the judge was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HELD_OUT = frozenset({"moe", "tagger", "vit", "denoiser", "train_resnet"})
Edit = tuple[str, str, str]  # file, text, replacement
Weights = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Commit:
    """One change. ``truth`` are the right answers for the layer; empty for a harmless change."""

    test: str
    title: str
    edits: tuple[Edit, ...] = ()
    weights: Weights | None = None
    truth: tuple[str, ...] = ()

    def apply(self, root: Path) -> None:
        """Change the files."""
        for name, old, new in self.edits:
            text = (root / name).read_text()
            assert old in text, f"{self.title}: {name} has no {old!r}"
            (root / name).write_text(text.replace(old, new, 1))
        if self.weights is not None:
            path = root / "weights" / f"{self.test.removeprefix('train_')}.pt"
            state = torch.load(path)
            self.weights(state)
            torch.save(state, path)


def code(test: str, truth: str, title: str, *pairs: str, file: str = "models.py") -> Commit:
    """A change of code: pairs of old and new text. Several right answers are separated by ``|``."""
    edits = tuple((file, old, new) for old, new in zip(pairs[::2], pairs[1::2], strict=True))
    return Commit(test, title, edits, None, tuple(truth.split("|")) if truth != "-" else ())


def setting(test: str, truth: str, old: str, new: str) -> Commit:
    return code(test, truth, f"{old} to {new}", f"{old}", f"{new}", file=f"config/{test}.json")


def weight(test: str, truth: str, title: str, change: Weights) -> Commit:
    return Commit(test, title, (), change, tuple(truth.split("|")) if truth != "-" else ())


def _one(name: str, index: tuple[int, ...], by: float) -> Weights:
    def change(state: dict[str, Any]) -> None:
        state[name][index] += by

    return change


def _map(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    def change(state: dict[str, Any]) -> None:
        state[name] = function(state[name])

    return change


def _swap(left: str, right: str) -> Weights:
    def change(state: dict[str, Any]) -> None:
        for key in [key for key in state if key.startswith(left)]:
            other = right + key.removeprefix(left)
            state[key], state[other] = state[other], state[key]

    return change


def _bits(value: torch.Tensor, bits: int) -> torch.Tensor:
    step = value.abs().max() / (2 ** (bits - 1) - 1)
    return (value / step).round() * step


def faults() -> list[Commit]:
    """Every fault."""
    return [
        *_gpt(),
        *_llama(),
        *_resnet(),
        *_train_gpt(),
        *_moe(),
        *_tagger(),
        *_vit(),
        *_denoiser(),
        *_train_resnet(),
    ]


def _gpt() -> list[Commit]:
    return [
        code("gpt", "blocks.0.attn", "attention without scale", " / math.sqrt(q.size(-1))", ""),
        code("gpt", "blocks.0.attn", "scale of the width", "math.sqrt(q.size(-1))", "math.sqrt(width)"),
        code("gpt", "blocks.0.attn", "mask hides the token itself", "bool).tril()", "bool).tril(-1).logical_or(torch.eye(length, dtype=torch.bool)[:, :1])"),
        code("gpt", "blocks.0.attn", "no causal mask", "scores = scores.masked_fill(~mask, float(\"-inf\"))", "pass"),
        code("gpt", "blocks.1.attn", "query and key swapped in one layer", "q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))", "q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))\n        if self.index == 1:\n            q, v = v, q"),
        code("gpt", "blocks.0.attn", "heads merged in the wrong order", "y.transpose(1, 2).reshape(batch, length, width)", "y.reshape(batch, length, width)"),
        code("gpt", "blocks.0.mlp.act", "tanh GELU", "self.act = nn.GELU()", "self.act = nn.GELU(approximate=\"tanh\")"),
        code("gpt", "blocks.0.mlp.act", "ReLU for GELU", "self.act = nn.GELU()", "self.act = nn.ReLU()"),
        code("gpt", "blocks.2.mlp", "activation left out in the last layer", "return self.down(self.act(self.up(x)))", "return self.down(self.act(self.up(x)) if self.index < 2 else self.up(x))"),
        code("gpt", "blocks.0", "residual left out", "x = x + self.mlp(self.norm2(x))", "x = self.mlp(self.norm2(x))"),
        code("gpt", "blocks.1", "second norm skipped in one layer", "x = x + self.mlp(self.norm2(x))", "x = x + self.mlp(self.norm2(x) if self.index != 1 else x)"),
        code("gpt", "", "no positions", "self.tokens(ids) + self.positions(places)", "self.tokens(ids)"),
        code("gpt", "", "positions off by one", "torch.arange(ids.size(1))", "torch.arange(ids.size(1)) + 1"),
        code("gpt", "", "embeddings scaled", "self.tokens(ids) +", "self.tokens(ids) * 1.01 +"),
        code("gpt", "", "final norm skipped", "x = self.norm(x)\n        return self.head(x)", "return self.head(x)"),
        code("gpt", "", "one block skipped", "for block in self.blocks:", "for block in self.blocks[:-1]:"),
        setting("gpt", "blocks.0.norm1", '"eps": 1e-05', '"eps": 1e-04'),
        setting("gpt", "blocks.0.norm1", '"eps": 1e-05', '"eps": 1e-06'),
        setting("gpt", "blocks.0.attn", '"heads": 4', '"heads": 8'),
        code("gpt", "blocks.0.attn", "scores in bfloat16", "y = F.softmax(scores, dim=-1) @ v", "y = (F.softmax(scores.bfloat16(), dim=-1) @ v.bfloat16()).float()"),
        code("gpt", "tokens", "whole model in bfloat16", "return model.eval()", "return model.eval().bfloat16()"),
        code("gpt", "blocks.1", "one block in float16", "return self.head(x)", "return self.head(x)\n\n    def eval(self):\n        self.blocks[1].half()\n        inner = self.blocks[1].forward\n        self.blocks[1].forward = lambda x: inner(x.half()).float()\n        return super().eval()"),
        code("gpt", "drop", "evaluated in training mode", "return model.eval()", "return model.train()", "dropout=0.0", "dropout=0.1"),
        code("gpt", "(inputs)", "other inputs", "(4, 24), generator=generator", "(4, 24), generator=generator).clamp(max=80"),
        code("gpt", "blocks.0.attn.query|blocks.0.attn|blocks.0.attn.query", "autocast", "    def forward(self, ids):\n        places", "    @torch.autocast(\"cpu\", dtype=torch.bfloat16)\n    def forward(self, ids):\n        places"),
        weight("gpt", "blocks.1.mlp.up", "one element", _one("blocks.1.mlp.up.weight", (7, 11), 0.05)),
        weight("gpt", "blocks.2.attn.proj", "a bias", _one("blocks.2.attn.proj.bias", (5,), 0.01)),
        weight("gpt", "tokens", "a row of an unused token", _one("tokens.weight", (95, 3), 0.5)),
        weight("gpt", "positions", "a row of an unused position", _one("positions.weight", (30, 3), 0.5)),
        weight("gpt", "blocks.0.attn.key", "transposed", _map("blocks.0.attn.key.weight", lambda w: w.t().contiguous())),
        weight("gpt", "blocks.1.norm2", "norm's gain", _map("blocks.1.norm2.weight", lambda w: w * 1.001)),
        weight("gpt", "blocks.1.norm1", "blocks swapped", _swap("blocks.1.", "blocks.2.")),
        weight("gpt", "head", "head rounded to 8 bits", _map("head.weight", lambda w: _bits(w, 8))),
        weight("gpt", "blocks.2.mlp.down", "one layer rounded to bfloat16", _map("blocks.2.mlp.down.weight", lambda w: w.bfloat16().float())),
    ]  # fmt: skip


def _llama() -> list[Commit]:
    return [
        setting("llama", "rotary", '"theta": 10000.0', '"theta": 50000.0'),
        setting("llama", "layers.0.input_norm", '"eps": 1e-06', '"eps": 1e-05'),
        code("llama", "layers.0.attention", "interleaved rotation", "turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)", "turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)"),
        code("llama", "layers.0.attention", "sign of the rotation", "x * cos + turned * sin", "x * cos - turned * sin"),
        code("llama", "layers.0.attention", "key not rotated", "q, k = rotate(q, cos, sin), rotate(k, cos, sin)", "q = rotate(q, cos, sin)"),
        code("llama", "layers.0.attention", "groups repeated in the wrong order", "k = k.repeat_interleave(self.heads // self.groups, dim=1)", "k = k.repeat(1, self.heads // self.groups, 1, 1)"),
        code("llama", "layers.0.mlp", "GELU for SiLU", "F.silu(self.gate(x))", "F.gelu(self.gate(x))"),
        code("llama", "layers.0.mlp", "gate and up exchanged", "F.silu(self.gate(x)) * self.up(x)", "self.gate(x) * F.silu(self.up(x))"),
        code("llama", "layers.0.input_norm", "norm with mean", "x.float().pow(2).mean(-1, keepdim=True)", "x.float().var(-1, keepdim=True, unbiased=False)"),
        code("llama", "layers.0.input_norm", "gain plus one", "return self.weight *", "return (1 + self.weight) *"),
        code("llama", "", "mask off by one", ".triu(1)", ".triu(2)"),
        code("llama", "", "embedding scaled", "x = self.embed(ids)", "x = self.embed(ids) * 48**0.5"),
        code("llama", "", "positions doubled", "self.rotary(torch.arange(length))", "self.rotary(torch.arange(length) * 2)"),
        code("llama", "rotary", "angles in bfloat16", "return angles.cos(), angles.sin()", "return angles.bfloat16().cos().float(), angles.sin()"),
        code("llama", "layers.1", "parallel residual in one layer", "return x + self.mlp(self.post_norm(x))", "return x + self.mlp(self.post_norm(x)) * (1.02 if self.index == 1 else 1.0)"),
        code("llama", "", "logits soft-capped", "self.lm_head(self.norm(x))", "30 * torch.tanh(self.lm_head(self.norm(x)) / 30)"),
        weight("llama", "layers.2.attention.k_proj", "two heads exchanged", _map("layers.2.attention.k_proj.weight", lambda w: torch.cat([w[8:], w[:8]]))),
        weight("llama", "layers.0.mlp.down", "scaled", _map("layers.0.mlp.down.weight", lambda w: w * 0.99)),
        weight("llama", "lm_head", "tied to the embedding", lambda s: s.update({"lm_head.weight": s["embed.weight"].clone()})),
    ]  # fmt: skip


def _resnet() -> list[Commit]:
    return [
        code("resnet", "stage1", "shortcut left out", "self.relu(y + self.shortcut(x))", "self.relu(y)"),
        code("resnet", "stage1.conv1", "circular padding", "self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)", "self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False, padding_mode=\"circular\")"),
        code("resnet", "pool", "average pooling", "nn.MaxPool2d(2)", "nn.AvgPool2d(2)"),
        code("resnet", "", "maximum over the picture", "x.mean(dim=(2, 3))", "x.amax(dim=(2, 3))"),
        code("resnet", "stage1.bn1", "eps of one norm", "self.bn1 = nn.BatchNorm2d(outside)", "self.bn1 = nn.BatchNorm2d(outside, eps=1e-3)"),
        code("resnet", "stage2.relu|stage1.relu|stage1", "leaky activation", "self.relu = nn.ReLU(inplace=True)", "self.relu = nn.LeakyReLU(0.01, inplace=True)"),
        code("resnet", "(inputs)", "pictures in another range", "generator=generator) * 2 - 1,)", "generator=generator),)"),
        weight("resnet", "stage2.bn2", "running mean", _one("stage2.bn2.running_mean", (3,), 0.05)),
        weight("resnet", "stage3.shortcut.1", "running variance reset", _map("stage3.shortcut.1.running_var", torch.ones_like)),
        weight("resnet", "stem.0", "colours reversed", _map("stem.0.weight", lambda w: w.flip(1))),
    ]  # fmt: skip


def _train_gpt() -> list[Commit]:
    edit = {"file": "train.py"}
    return [
        code("train_gpt", "(optimizer)", "learning rate", "lr=1e-3", "lr=3e-3", **edit),
        code("train_gpt", "(optimizer)", "betas", "betas=(0.9, 0.95)", "betas=(0.9, 0.999)", **edit),
        code("train_gpt", "(optimizer)", "Adam for AdamW", "torch.optim.AdamW", "torch.optim.Adam", **edit),
        code("train_gpt", "(optimizer)", "no warm-up", "start_factor=0.5", "start_factor=1.0", **edit),
        code("train_gpt", "(step)", "clipping at 0.5", "model.parameters(), 1.0", "model.parameters(), 0.5", **edit),
        code("train_gpt", "(loss)", "labels not shifted", "ids[:, 1:].flatten()", "ids[:, :-1].flatten()", **edit),
        code("train_gpt", "(loss)", "label smoothing", "ids[:, 1:].flatten())", "ids[:, 1:].flatten(), label_smoothing=0.1)", **edit),
        code("train_gpt", "(step)|(optimizer)", "gradients not cleared", "        optimizer.zero_grad()\n", "", **edit),
        code("train_gpt", "blocks.1.mlp", "gradient cut inside one layer", "return self.down(self.act(self.up(x)))", "return self.down(self.act(self.up(x)) if self.index != 1 else self.act(self.up(x)).detach())"),
        code("train_gpt", "blocks.0.attn.key|blocks.0.attn", "key detached", "self.split(self.key(x)), self.split(self.value(x))", "self.split(self.key(x.detach()) if self.index == 0 else self.key(x)), self.split(self.value(x))"),
        code("train_gpt", "positions", "a frozen embedding", "def train_gpt():\n    model = load(\"gpt\").train()", "def train_gpt():\n    model = load(\"gpt\").train()\n    model.positions.requires_grad_(False)", **edit),
        code("train_gpt", "drop", "dropout", '"eps": 1e-05', '"eps": 1e-05, "dropout": 0.1', file="config/gpt.json"),
    ]  # fmt: skip


def _moe() -> list[Commit]:
    return [
        setting("moe", "mixtures.0", '"chosen": 2', '"chosen": 1'),
        code("moe", "mixtures.0", "weights not normalised", "        weights = weights / weights.sum(dim=-1, keepdim=True)\n", ""),
        code("moe", "mixtures.0", "sigmoid gates", "F.softmax(self.router(flat), dim=-1)", "torch.sigmoid(self.router(flat))"),
        code("moe", "mixtures.0.experts.0", "SiLU experts", "F.relu(self.w1(x))", "F.silu(self.w1(x))"),
        code("moe", "mixtures.0", "last expert never used", "enumerate(self.experts):", "enumerate(self.experts[:-1]):"),
        code("moe", "", "no tanh", "torch.tanh(self.inlet(x))", "self.inlet(x)"),
        code("moe", "", "no residual", "x = x + mixture(norm(x))", "x = mixture(norm(x))"),
        weight("moe", "mixtures.1.router", "router's rows exchanged", _map("mixtures.1.router.weight", lambda w: w.flip(0))),
        weight("moe", "mixtures.1.experts.2.w1", "one element of one expert", _one("mixtures.1.experts.2.w1.weight", (3, 3), 0.1)),
        weight("moe", "mixtures.0.router", "experts exchanged, router rounded", _map("mixtures.0.router.weight", lambda w: w.half().float())),
    ]  # fmt: skip


def _tagger() -> list[Commit]:
    return [
        code("tagger", "", "read backwards", "states, _ = self.lstm(x)", "states, _ = self.lstm(x.flip(1))\n        states = states.flip(1)"),
        code("tagger", "", "states rolled", "states, _ = self.lstm(x)", "states, _ = self.lstm(x)\n        states = states.roll(1, 1)"),
        code("tagger", "project.1", "another activation", "nn.Tanh()", "nn.Hardtanh()"),
        code("tagger", "", "plain softmax", "F.log_softmax", "F.softmax"),
        code("tagger", "", "temperature", "F.log_softmax(scores,", "F.log_softmax(scores / 1.05,"),
        weight("tagger", "lstm", "forget gate's bias", _one("lstm.bias_ih_l0", (25,), 1.0)),
        weight("tagger", "lstm", "gates in another order", _map("lstm.weight_ih_l1", lambda w: w.roll(20, 0))),
        weight("tagger", "embedding", "a row of an unused word", _one("embedding.weight", (62, 1), 0.3)),
        weight("tagger", "project.2", "last layer scaled", _map("project.2.weight", lambda w: w * 1.0005)),
    ]  # fmt: skip


def _vit() -> list[Commit]:
    return [
        code("vit", "encoder.layers.0", "norm last", "norm_first=True", "norm_first=False"),
        code("vit", "encoder.layers.0", "ReLU", '"gelu"', '"relu"'),
        code("vit", "", "mean instead of the class token", "self.norm(x)[:, 0]", "self.norm(x).mean(1)"),
        code("vit", "", "class token at the end", "torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)", "torch.cat([x, self.cls.expand(len(x), -1, -1)], dim=1)"),
        code("vit", "", "patches in another order", ".flatten(2).transpose(1, 2)", ".transpose(2, 3).flatten(2).transpose(1, 2)"),
        code("vit", "norm", "eps", "self.norm = nn.LayerNorm(width)\n        self.classify", "self.norm = nn.LayerNorm(width, eps=1e-3)\n        self.classify"),
        weight("vit", "", "one position", _one("places", (0, 3, 5), 0.1)),
        weight("vit", "encoder.layers.1.self_attn", "key and value exchanged", _map("encoder.layers.1.self_attn.in_proj_weight", lambda w: torch.cat([w[:32], w[64:], w[32:64]]))),
        weight("vit", "encoder.layers.1.linear2", "one element", _one("encoder.layers.1.linear2.weight", (1, 60), 0.2)),
        setting("vit", "encoder.layers.0.self_attn", '"heads": 4', '"heads": 2'),
    ]  # fmt: skip


def _denoiser() -> list[Commit]:
    return [
        code("denoiser", "", "time's rates", "math.log(1000.0)", "math.log(10000.0)"),
        code("denoiser", "", "sine and cosine exchanged", "[angles.sin(), angles.cos()]", "[angles.cos(), angles.sin()]"),
        code("denoiser", "down1", "activation left out", "F.silu(self.norm(x))", "self.norm(x)"),
        code("denoiser", "up1", "bilinear", 'mode="nearest"', 'mode="bilinear"'),
        code("denoiser", "", "skip connections exchanged", "torch.cat([x, second], dim=1)", "torch.cat([second, x], dim=1)"),
        code("denoiser", "down1.norm", "groups", "nn.GroupNorm(4, inside)\n        self.conv = nn.Conv2d(inside, outside, 3, 2, 1)", "nn.GroupNorm(2, inside)\n        self.conv = nn.Conv2d(inside, outside, 3, 2, 1)"),
        code("denoiser", "(inputs)", "times counted from zero", "[1, 40, 300, 999]", "[0, 39, 299, 998]"),
        code("denoiser", "up2", "time left out in one part", "self.up2(torch.cat([x, second], dim=1), time)", "self.up2(torch.cat([x, second], dim=1), time)", "return F.silu(self.conv(x) + self.time(t)[:, :, None, None])", "y = self.conv(x)\n        return F.silu(y if y.shape[-1] == 16 else y + self.time(t)[:, :, None, None])"),
        weight("denoiser", "down2.time", "bias", _one("down2.time.bias", (2,), 0.02)),
        weight("denoiser", "leave", "channels exchanged", _map("leave.weight", lambda w: w.flip(0))),
    ]  # fmt: skip


def _train_resnet() -> list[Commit]:
    edit = {"file": "train.py"}
    return [
        code("train_resnet", "(optimizer)", "no Nesterov", ", nesterov=True", "", **edit),
        code("train_resnet", "(optimizer)", "momentum", "momentum=0.9", "momentum=0.8", **edit),
        code("train_resnet", "(optimizer)", "weight decay", "lr=0.05,", "lr=0.05, weight_decay=5e-4,", **edit),
        code("train_resnet", "(loss)", "smoothing", "label_smoothing=0.1) / 2", "label_smoothing=0.0) / 2", **edit),
        code("train_resnet", "(loss)", "parts not averaged", "label_smoothing=0.1) / 2", "label_smoothing=0.1)", **edit),
        code("train_resnet", "stem.1", "momentum of a norm", "nn.BatchNorm2d(channels)", "nn.BatchNorm2d(channels, momentum=0.2)"),
        code("train_resnet", "stem.1", "trained in evaluation mode", 'model = load("resnet").train()', 'model = load("resnet")', **edit),
        code("train_resnet", "fc|", "head's gradient cut", "return self.fc(x)", "return F.linear(x, self.fc.weight.detach(), self.fc.bias)"),
        code("train_resnet", "(inputs)", "other pictures", "* 2 - 1", "* 2 - 1.1", **edit),
        code("train_resnet", "|stage2|stage3", "gradient scaled between two stages", "x = self.stage3(self.stage2(self.stage1(x)))", "y = self.stage2(self.stage1(x))\n        if y.requires_grad:\n            y.register_hook(lambda g: g * 1.5)\n        x = self.stage3(y)"),
    ]  # fmt: skip


_SDPA = """        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj("""
_MANUAL = """        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.proj("""
_FUSED = (
    """        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
""",
    "        self.qkv = nn.Linear(width, 3 * width)\n",
    "q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))",
    "q, k, v = map(self.split, self.qkv(x).chunk(3, dim=-1))",
    "def adapt(name, state):\n    return state",
    """def adapt(name, state):
    for i in range(3):
        for part in ("weight", "bias"):
            parts = [state.pop(f"blocks.{i}.attn.{which}.{part}") for which in ("query", "key", "value")]
            state[f"blocks.{i}.attn.qkv.{part}"] = torch.cat(parts)
    return state""",
)


def _renamed(old: str, new: str) -> str:
    return f'def adapt(name, state):\n    return {{key.replace("{old}", "{new}"): value for key, value in state.items()}}'


_ADAPT = "def adapt(name, state):\n    return state"


def harmless() -> list[Commit]:
    """Every harmless change."""
    return [*_same_gpt(), *_same_llama(), *_same_resnet(), *_same_training(), *_same_others(), *_same_flags()]


def _same_gpt() -> list[Commit]:
    def same(title: str, *pairs: str) -> Commit:
        return code("gpt", "-", title, *pairs)

    return [
        same("sdpa", _MANUAL, _SDPA),
        same("fused qkv", *_FUSED),
        same("fused qkv and sdpa", _MANUAL, _SDPA, *_FUSED),
        same("blocks renamed", "self.blocks = nn", "self.layers = nn", "for block in self.blocks", "for block in self.layers", _ADAPT, _renamed("blocks.", "layers.")),
        same("mlp renamed", "self.mlp = FeedForward", "self.feed_forward = FeedForward", "self.mlp(self.norm2(x))", "self.feed_forward(self.norm2(x))", _ADAPT, _renamed(".mlp.", ".feed_forward.")),
        same("classes renamed", "class GPTBlock(nn.Module):", "class TransformerBlock(nn.Module):", "[GPTBlock(", "[TransformerBlock("),
        same("compiled", "return model.eval()", "return torch.compile(model.eval(), backend=\"aot_eager\")"),
        same("compiled in place", "return model.eval()", "model.eval().compile(backend=\"eager\")\n    return model"),
        same("blocks compiled", "return model.eval()", "model.blocks = nn.ModuleList([torch.compile(b, backend=\"aot_eager\") for b in model.blocks])\n    return model.eval()"),
        same("batch reversed", "generator=generator),)\n    if name == \"tagger\"", "generator=generator).flip(0),)\n    if name == \"tagger\""),
        same("batch rolled", "generator=generator),)\n    if name == \"tagger\"", "generator=generator).roll(1, 0),)\n    if name == \"tagger\""),
        same("GELU by hand", "self.act(self.up(x))", "(lambda h: 0.5 * h * (1 + torch.erf(h / math.sqrt(2))))(self.up(x))"),
        same("functional GELU", "self.act(self.up(x))", "F.gelu(self.up(x))"),
        same("norm by hand", "x = x + self.attn(self.norm1(x))", "n = self.norm1\n        c = x - x.mean(-1, keepdim=True)\n        x = x + self.attn(c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + n.eps) * n.weight + n.bias)"),
        same("softmax by hand", "F.softmax(scores, dim=-1) @ v", "(lambda e: e / e.sum(-1, keepdim=True))(torch.exp(scores - scores.amax(-1, keepdim=True))) @ v"),
        same("scale on the query", "q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))", "(q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)"),
        same("mask added", "scores = scores.masked_fill(~mask, float(\"-inf\"))", "scores = scores + torch.zeros(length, length).masked_fill(~mask, float(\"-inf\"))"),
        same("mask of the lowest number", "scores.masked_fill(~mask, float(\"-inf\"))", "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)"),
        same("einsum", "q @ k.transpose(-2, -1) /", "torch.einsum(\"bhid,bhjd->bhij\", q, k) /"),
        same("linear as matmul", "return self.head(x)", "return x @ self.head.weight.t()"),
        same("dropout added, in evaluation", "dropout=0.0", "dropout=0.1"),
        same("residual in place", "x = x + self.mlp(self.norm2(x))", "x = x.clone()\n        x += self.mlp(self.norm2(x))"),
        same("a tuple is returned", "return self.head(x)", "return (self.head(x),)"),
        same("mlp as Sequential", "        self.up = nn.Linear(width, 4 * width)\n        self.act = nn.GELU()\n        self.down = nn.Linear(4 * width, width)\n", "        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))\n", "return self.down(self.act(self.up(x)))", "return self.net(x)", _ADAPT, 'def adapt(name, state):\n    return {key.replace(".up.", ".net.0.").replace(".down.", ".net.2."): value for key, value in state.items()}'),
        same("scale folded into the query's weight", " / math.sqrt(q.size(-1))", "", _ADAPT, 'def adapt(name, state):\n    for key in state:\n        if ".query." in key:\n            state[key] = state[key] / 12**0.5\n    return state'),
        same("comments and formatting", "# -- gpt ---", "# The first model.\n# -- gpt ---"),
        same("float64 softmax", "F.softmax(scores, dim=-1) @ v", "F.softmax(scores.double(), dim=-1).float() @ v"),
        same("blocks wrapped", "for block in self.blocks:\n            x = block(x)", "x = self.run(x)", "    def forward(self, ids):\n        places", "    def run(self, x):\n        for block in self.blocks:\n            x = block(x)\n        return x\n\n    def forward(self, ids):\n        places"),
    ]  # fmt: skip


def _same_llama() -> list[Commit]:
    def same(title: str, *pairs: str) -> Commit:
        return code("llama", "-", title, *pairs)

    return [
        same("sdpa", "        scores = q @ k.transpose(2, 3) * self.size**-0.5 + mask\n        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)\n        out = (weights @ v).transpose", "        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose"),
        same("fused gate and up", "        self.gate = nn.Linear(width, inner, bias=False)\n        self.up = nn.Linear(width, inner, bias=False)\n", "        self.both = nn.Linear(width, 2 * inner, bias=False)\n", "F.silu(self.gate(x)) * self.up(x)", "(lambda g, u: F.silu(g) * u)(*self.both(x).chunk(2, -1))", _ADAPT, 'def adapt(name, state):\n    for i in range(3):\n        state[f"layers.{i}.mlp.both.weight"] = torch.cat([state.pop(f"layers.{i}.mlp.{w}.weight") for w in ("gate", "up")])\n    return state'),
        same("torch's RMSNorm", "scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)\n        return self.weight * (x.float() * scale).to(x.dtype)", "return F.rms_norm(x, self.weight.shape, self.weight, self.eps)"),
        same("complex rotation", "turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)\n    return x * cos + turned * sin", "z = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos[..., :half], sin[..., :half])\n    return torch.cat([z.real, z.imag], dim=-1)"),
        same("groups expanded", "k = k.repeat_interleave(self.heads // self.groups, dim=1)", "k = k[:, :, None].expand(-1, -1, self.heads // self.groups, -1, -1).reshape(batch, self.heads, length, -1)"),
        same("attribute output", 'return {"logits": self.lm_head(self.norm(x))}', "return self.lm_head(self.norm(x))"),
        same("positions start at one, which a rotation does not see", "self.rotary(torch.arange(length))", "self.rotary(torch.arange(length) + 1)"),
        same("an extra result", 'return {"logits": self.lm_head(self.norm(x))}', 'return {"logits": self.lm_head(self.norm(x)), "hidden": x}'),
        same("projections renamed", "self.o_proj = nn", "self.out = nn", "return self.o_proj(out)", "return self.out(out)", _ADAPT, _renamed(".o_proj.", ".out.")),
        same("tables kept", "cos, sin = self.rotary(torch.arange(length))", "cos, sin = (t.clone() for t in self.rotary(torch.arange(64)))\n        cos, sin = cos[:length], sin[:length]"),
        same("compiled with inductor", "return model.eval()", "return torch.compile(model.eval())"),
        same("batch reversed", "generator=generator),)\n    if name == \"tagger\"", "generator=generator).flip(0),)\n    if name == \"tagger\""),
        same("silu by hand", "F.silu(self.gate(x)) *", "(lambda g: g * torch.sigmoid(g))(self.gate(x)) *"),
    ]  # fmt: skip


def _same_resnet() -> list[Commit]:
    def same(title: str, *pairs: str) -> Commit:
        return code("resnet", "-", title, *pairs)

    return [
        same("pool of torch", "x.mean(dim=(2, 3))", "F.adaptive_avg_pool2d(x, 1).flatten(1)"),
        same("relu not in place", "nn.ReLU(inplace=True)", "nn.ReLU()"),
        same("functional relu", "return self.relu(y + self.shortcut(x))", "return F.relu(y + self.shortcut(x))"),
        same("channels last", "return model.eval()", "return model.eval().to(memory_format=torch.channels_last)"),
        same("norm folded into the convolution", "y = self.relu(self.bn1(self.conv1(x)))", "w = self.bn1.weight / torch.sqrt(self.bn1.running_var + self.bn1.eps)\n        y = self.relu(F.conv2d(x, self.conv1.weight * w[:, None, None, None], self.bn1.bias - self.bn1.running_mean * w, self.conv1.stride, 1))"),
        same("batch reversed", "* 2 - 1,)", "* 2 - 1,)[0].flip(0)"),
        same("stages in a Sequential", "x = self.stage3(self.stage2(self.stage1(x)))", "x = nn.Sequential(self.stage1, self.stage2, self.stage3)(x)"),
        same("compiled", "return model.eval()", "return torch.compile(model.eval(), backend=\"aot_eager\")"),
    ]  # fmt: skip


def _same_training() -> list[Commit]:
    edit = {"file": "train.py"}
    return [
        code("train_gpt", "-", "sdpa", _MANUAL, _SDPA),
        code("train_gpt", "-", "loss by hand", "F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())", "-logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()", **edit),
        code("train_gpt", "-", "for each parameter", "betas=(0.9, 0.95))", "betas=(0.9, 0.95), foreach=False)", **edit),
        code("train_gpt", "-", "fused optimizer", "betas=(0.9, 0.95))", "betas=(0.9, 0.95), fused=True)", **edit),
        code("train_gpt", "-", "set_to_none", "optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", **edit),
        code("train_gpt", "-", "checkpointing", "for block in self.blocks:\n            x = block(x)", "for block in self.blocks:\n            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.training else block(x)", "from torch import nn\n", "from torch import nn\nimport torch.utils.checkpoint\n"),
        code("train_resnet", "-", "loss by hand", "F.cross_entropy(model(part), truth, label_smoothing=0.1) / 2", "(lambda p: -(0.9 * p.gather(1, truth[:, None]).mean() + 0.1 * p.mean()))(model(part).log_softmax(1)) / 2", **edit),
        code("train_resnet", "-", "foreach", "nesterov=True)", "nesterov=True, foreach=True)", **edit),
    ]  # fmt: skip


def _same_others() -> list[Commit]:
    return [
        code("moe", "-", "top-k of the logits", "gates = F.softmax(self.router(flat), dim=-1)\n        weights, picked = gates.topk(self.chosen, dim=-1)\n        weights = weights / weights.sum(dim=-1, keepdim=True)", "weights, picked = self.router(flat).topk(self.chosen, dim=-1)\n        weights = F.softmax(weights, dim=-1)"),
        code("moe", "-", "experts on everything", "rows, slots = (picked == number).nonzero(as_tuple=True)\n            if rows.numel():\n                out.index_add_(0, rows, weights[rows, slots, None] * expert(flat[rows]))", "out = out + (weights * (picked == number)).sum(-1, keepdim=True) * expert(flat)"),
        code("moe", "-", "batch reversed", "(torch.randn(4, 16, 12, generator=generator),)", "(torch.randn(4, 16, 12, generator=generator).flip(0),)"),
        code("tagger", "-", "softmax then log", "F.log_softmax(scores, dim=-1)", "torch.log(F.softmax(scores, dim=-1))"),
        code("tagger", "-", "embedding by lookup", "x = self.embedding(ids)", "x = self.embedding.weight[ids]"),
        code("vit", "-", "patches by unfold", "self.patches(images).flatten(2).transpose(1, 2)", "F.unfold(images, 8, stride=8).transpose(1, 2) @ self.patches.weight.flatten(1).t() + self.patches.bias"),
        code("vit", "-", "fast path off", "def load(name):", "def load(name):\n    torch.backends.mha.set_fastpath_enabled(False)"),
        code("vit", "-", "norm of one token", "self.norm(x)[:, 0]", "self.norm(x[:, 0])"),
        code("denoiser", "-", "upsampling by repetition", 'F.interpolate(self.norm(x), scale_factor=2, mode="nearest")', "self.norm(x).repeat_interleave(2, 2).repeat_interleave(2, 3)"),
        code("denoiser", "-", "blocks called by keyword", "self.down1(first, time)", "self.down1(first, t=time)"),
        code("denoiser", "-", "batch reversed", "return (torch.randn(4, 3, 16, 16, generator=generator), torch.tensor([1, 40, 300, 999]))", "return (torch.randn(4, 3, 16, 16, generator=generator).flip(0), torch.tensor([999, 300, 40, 1]))"),
    ]  # fmt: skip


def new_faults() -> list[Commit]:
    """Faults that were written after the judge, and were not used to improve it."""
    loop = {"file": "train.py"}
    return [
        code("translator", "decoder.0", "cross attention reads its own states", "self.cross(self.norm2(x), memory, padding)", "self.cross(self.norm2(x), x)"),
        code("translator", "", "padding ignored in the encoder", "memory = layer(memory, padding)", "memory = layer(memory, None)"),
        code("translator", "", "logits not scaled", " * self.scale,", ","),
        code("translator", "decoder.1", "norms exchanged in one layer", "return x + self.feed(self.norm3(x))", "return x + self.feed(self.norm3(x) if self.index == 0 else self.norm2(x))"),
        weight("translator", "", "two positions exchanged", _map("places", lambda w: w[[0, 1, 3, 2, *range(4, 40)]])),
        code("llama", "layers.0.attention.q_proj", "autocast for the whole process", "    return model.eval()", "    torch.autocast(\"cpu\", dtype=torch.bfloat16).__enter__()\n    return model.eval()"),
        code("resnet", "stage2.bn1", "one norm stays in training mode", "    return model.eval()", "    model.eval().stage2.bn1.train()\n    return model"),
        code("moe", "mixtures.0", "tokens over the capacity are dropped", "            if rows.numel():", "            rows, slots = rows[:28], slots[:28]\n            if rows.numel():"),
        code("denoiser", "up1.norm", "eps of one kind of norm", "self.norm = nn.GroupNorm(4, inside)\n        self.conv = nn.Conv2d(inside, outside, 3, 1, 1)", "self.norm = nn.GroupNorm(4, inside, eps=1e-6)\n        self.conv = nn.Conv2d(inside, outside, 3, 1, 1)"),
        code("tagger", "|lstm", "a first state that is not zero", "self.lstm(x)", "self.lstm(x, (torch.full((4, len(x), 20), 0.01), torch.zeros(4, len(x), 20)))"),
        code("train_resnet", "(step)", "gradients cleared between the parts", "            loss.backward()", "            optimizer.zero_grad()\n            loss.backward()", **loop),
        code("train_gpt", "(optimizer)", "decay of all parameters", '"weight_decay": 0.0', '"weight_decay": 0.1', **loop),
    ]  # fmt: skip


def new_harmless() -> list[Commit]:
    """Harmless changes that were written after the judge, and were not used to improve it."""
    loop = {"file": "train.py"}
    return [
        code("translator", "-", "key and value as two projections", "        self.kv = nn.Linear(width, 2 * width)\n", "        self.k, self.v = nn.Linear(width, width), nn.Linear(width, width)\n", "k, v = self.kv(memory).view(batch, memory.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)", "k, v = (p(memory).view(batch, memory.shape[1], self.heads, -1).transpose(1, 2) for p in (self.k, self.v))", _ADAPT, 'def adapt(name, state):\n    for key in [key for key in state if ".kv." in key]:\n        halves = state.pop(key).chunk(2)\n        state.update({key.replace(".kv.", f".{part}."): half for part, half in zip("kv", halves)})\n    return state'),
        code("translator", "-", "the encoder as a class", "class Translator(nn.Module):", "class Encoder(nn.Module):\n    def __init__(self, width, heads, layers):\n        super().__init__()\n        self.layers = nn.ModuleList([EncoderLayer(width, heads) for _ in range(layers)])\n\n    def forward(self, x, padding):\n        for layer in self.layers:\n            x = layer(x, padding)\n        return x\n\n\nclass Translator(nn.Module):", "self.encoder = nn.ModuleList([EncoderLayer(width, heads) for _ in range(layers)])", "self.encoder = Encoder(width, heads, layers)", "        for layer in self.encoder:\n            memory = layer(memory, padding)", "        memory = self.encoder(memory, padding)", _ADAPT, _renamed("encoder.", "encoder.layers.")),
        code("translator", "-", "sdpa", "        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5\n        if hidden is not None:\n            scores = scores.masked_fill(hidden, float(\"-inf\"))\n        y = scores.softmax(-1) @ v", "        y = F.scaled_dot_product_attention(q, k, v, None if hidden is None else ~hidden)"),
        code("translator", "-", "layers compiled in place", "    return model.eval()", "    for layer in model.decoder:\n        layer.compile(backend=\"aot_eager\")\n    return model.eval()"),
        weight("gpt", "-", "weights kept in float64", lambda state: state.update({key: value.double() for key, value in state.items()})),
        code("llama", "-", "projections as functions", "q = self.q_proj(x).view", "q = F.linear(x, self.q_proj.weight).view", "k = self.k_proj(x).view", "k = F.linear(x, self.k_proj.weight).view"),
        code("resnet", "-", "inputs by keyword", "    return (torch.rand(4, 3, 32, 32, generator=generator) * 2 - 1,)", "    return {\"images\": torch.rand(4, 3, 32, 32, generator=generator) * 2 - 1}"),
        code("moe", "-", "experts from last to first", "in enumerate(self.experts):", "in reversed(list(enumerate(self.experts))):"),
        code("tagger", "-", "time first", "num_layers=2, batch_first=True,", "num_layers=2,", "        states, _ = self.lstm(x)", "        states, _ = self.lstm(x.transpose(0, 1))\n        states = states.transpose(0, 1)"),
        code("vit", "-", "inside a wrapper", "    return model.eval()", "    class Wrapper(nn.Module):\n        def __init__(self, inner):\n            super().__init__()\n            self.inner = inner\n\n        def forward(self, *args):\n            return self.inner(*args)\n\n    return Wrapper(model).eval()"),
        code("denoiser", "-", "a 1 x 1 convolution as einsum", "return self.leave(torch.cat([x, first], dim=1))", "return torch.einsum(\"bchw,oc->bohw\", torch.cat([x, first], dim=1), self.leave.weight[:, :, 0, 0]) + self.leave.bias[:, None, None]"),
        code("train_gpt", "-", "the batch in two halves", "        logits = model(ids[:, :-1])\n        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())\n        loss.backward()", "        loss = 0.0\n        for half in ids.chunk(2):\n            part = F.cross_entropy(model(half[:, :-1]).flatten(0, 1), half[:, 1:].flatten()) / 2\n            part.backward()\n            loss += part.detach()", **loop),
    ]  # fmt: skip


def _same_flags() -> list[Commit]:
    return [
        code("gpt", "-", "deterministic algorithms", "def load(name):", "def load(name):\n    torch.use_deterministic_algorithms(True)"),
        code("resnet", "-", "without oneDNN", "def load(name):", "def load(name):\n    torch.backends.mkldnn.enabled = False"),
        code("llama", "-", "no gradients", "return model.eval()", "torch.set_grad_enabled(False)\n    return model.eval()"),
    ]  # fmt: skip
