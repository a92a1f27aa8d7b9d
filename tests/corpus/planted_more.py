"""Further models for planting faults, of kinds that the others are not: running statistics, depthwise convolutions, a
decoder that loops, messages along edges, times and conditions, and Hugging Face's with shared layers, sounds, states
and two towers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MORE"]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _tokens(length: int = 10) -> Tensor:
    return torch.randint(3, 89, (2, length), generator=torch.Generator().manual_seed(1))


class ResidualBlock(nn.Module):
    """As in torchvision's ResNet, with activations and sums in place."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
            if stride != 1 or inner != outer
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += skip
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 8, 1))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16, 2), ResidualBlock(16, 16, 1))
        self.fc = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(images)))))
        return self.fc(x.mean((2, 3)))


class NextBlock(nn.Module):
    """As in ConvNeXt: depthwise, channels last, a scale of its own for each layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(self.act(self.up(y)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.between = nn.Conv2d(3, 16, 2, 2), nn.Conv2d(16, 32, 2, 2)
        self.stage1 = nn.Sequential(NextBlock(16), NextBlock(16))
        self.stage2 = nn.Sequential(NextBlock(32), NextBlock(32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 7)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stage2(self.between(self.stage1(self.stem(images))))
        return self.head(self.norm(x.mean((2, 3))))


class Translator(nn.Module):
    """A recurrent encoder, and a decoder that calls its modules once for each word."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.source, self.words = nn.Embedding(90, width), nn.Embedding(90, width)
        self.encoder = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.bridge, self.query = nn.Linear(2 * width, width), nn.Linear(width, 2 * width)
        self.cell, self.out = nn.LSTMCell(2 * width, width), nn.Linear(3 * width, 90)

    def forward(self, source: Tensor, words: Tensor) -> Tensor:
        memory, _ = self.encoder(self.source(source))
        hidden = torch.tanh(self.bridge(memory[:, -1]))
        state, context = (hidden, torch.zeros_like(hidden)), torch.zeros_like(hidden)
        results = []
        for at in range(words.shape[1]):
            state = self.cell(torch.cat([self.words(words[:, at]), context], -1), state)
            scores = torch.einsum("bd,btd->bt", self.query(state[0]), memory).softmax(-1)
            looked = torch.einsum("bt,btd->bd", scores, memory)
            context = looked[:, : hidden.shape[1]]
            results.append(self.out(torch.cat([state[0], looked], -1)))
        return torch.stack(results, 1)


class EdgeAttention(nn.Module):
    def __init__(self, inner: int, outer: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.outer = heads, outer
        self.lift = nn.Linear(inner, outer * heads)
        self.scores = nn.Parameter(0.3 * torch.randn(heads, 2 * outer))
        self.norm = nn.LayerNorm(outer * heads)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        z = self.lift(x).view(-1, self.heads, self.outer)
        source, goal = edges
        score = F.leaky_relu((torch.cat([z[source], z[goal]], -1) * self.scores).sum(-1), 0.2)
        weight = (score - score.max()).exp()
        total = torch.zeros(len(x), self.heads, dtype=x.dtype).index_add_(0, goal, weight)
        share = (weight / (total[goal] + 1e-9)).unsqueeze(-1)
        return self.norm(torch.zeros_like(z).index_add_(0, goal, share * z[source]).flatten(1))


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EdgeAttention(12, 16), EdgeAttention(32, 16), EdgeAttention(32, 16)])
        self.act, self.head = nn.ReLU(), nn.Linear(32, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x, edges))
        return self.head(x)


class TimedBlock(nn.Module):
    def __init__(self, channels: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(time, 2 * channels)
        self.norm2, self.conv2 = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, 1)
        y = self.norm2(self.conv1(F.silu(self.norm1(x)))) * (1 + scale) + shift
        return x + self.conv2(F.silu(y))


class Denoiser(nn.Module):
    """A step of a diffusion model: a picture, a time, and a condition that is attended to. Returns a dictionary."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.time1, self.time2 = nn.Linear(16, 32), nn.Linear(32, 32)
        self.enter, self.leave = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.first, self.middle = TimedBlock(channels, 32), TimedBlock(channels, 32)
        self.norm = nn.GroupNorm(4, channels)
        self.attention = nn.MultiheadAttention(channels, 4, kdim=20, vdim=20, batch_first=True)
        self.down, self.up = (
            nn.Conv2d(channels, channels, 3, 2, 1),
            nn.ConvTranspose2d(channels, channels, 4, 2, 1),
        )

    def forward(self, picture: Tensor, time: Tensor, condition: Tensor) -> dict[str, Tensor]:
        rates = torch.exp(-math.log(1000) * torch.arange(8) / 8).to(picture.dtype)
        angles = time[:, None].to(picture.dtype) * rates
        told = self.time2(F.silu(self.time1(torch.cat([angles.sin(), angles.cos()], -1))))
        x = self.first(self.enter(picture), told)
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        looked, _ = self.attention(pixels, condition, condition, need_weights=False)
        x = x + looked.transpose(1, 2).reshape(x.shape)
        middle = self.middle(self.down(x), told)
        return {"sample": self.leave(x + self.up(middle)), "middle": middle}


def _hf(kind: str, maker: str = "AutoModel", **given: Any) -> nn.Module:
    import transformers

    model = getattr(transformers, maker).from_config(transformers.AutoConfig.for_model(kind, **given))
    model.generation_config = None
    assert isinstance(model, nn.Module)
    return model


def _masked() -> dict[str, Any]:
    tokens = _tokens()
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


_WORDS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
_BOTH = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
MORE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "qwen3": lambda: (
        _hf("qwen3", "AutoModelForCausalLM", num_key_value_heads=2, head_dim=8, **_SMALL, **_WORDS),
        {**_masked(), "use_cache": False},
    ),
    "deberta": lambda: (
        _hf("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], **_SMALL, **_WORDS),
        _masked(),
    ),
    "albert": lambda: (_hf("albert", embedding_size=16, **_SMALL, **_WORDS), _masked()),
    "whisper": lambda: (
        _hf("whisper", d_model=32, num_mel_bins=8, max_source_positions=20, **_BOTH, **_WORDS),
        {"input_features": _random(2, 8, 40), "decoder_input_ids": _tokens(), "use_cache": False},
    ),
    "mamba": lambda: (
        _hf("mamba", "AutoModelForCausalLM", hidden_size=32, state_size=8, num_hidden_layers=3, **_WORDS),
        {"input_ids": _tokens(), "use_cache": False},
    ),
    "clip": lambda: (
        _hf(
            "clip",
            text_config={"max_position_embeddings": 32, "projection_dim": 16, **_SMALL, **_WORDS},
            vision_config={"image_size": 16, "patch_size": 4, "projection_dim": 16, **_SMALL},
            projection_dim=16,
        ),
        {"input_ids": _tokens(), "pixel_values": _random(2, 3, 16, 16)},
    ),
    "ResNet": lambda: (ResNet(), (_random(2, 3, 16, 16),)),
    "ConvNeXt": lambda: (ConvNeXt(), (_random(2, 3, 16, 16),)),
    "translator": lambda: (Translator(), (_tokens(7), _tokens(6).flip(1))),
    "graph": lambda: (
        GraphNet(),
        (_random(20, 12), torch.randint(0, 20, (2, 70), generator=torch.Generator().manual_seed(2))),
    ),
    "denoiser": lambda: (Denoiser(), (_random(2, 3, 16, 16), torch.tensor([3, 700]), _random(2, 5, 20))),
}
