"""Architectures written here: torch.nn, torchvision-like networks, and the ways in which people bend models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.corpus.zoo_bent import BENT
from tests.corpus.zoo_hugging_face import HUGGING_FACE, Built
from tests.corpus.zoo_images import IMAGES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["ARCHITECTURES", "build"]


class _DropPath(nn.Module):
    """Drops a residual branch while training; returns its input as it is in evaluation."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = torch.rand(x.shape[0], *(1,) * (x.ndim - 1)) > self.rate
        return x * keep / (1 - self.rate)


class _Residual(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.drop = _DropPath()
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(width, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        return self.act(self.drop(self.bn2(self.conv2(y))) + self.shortcut(x))


def _resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    stages = nn.Sequential(_Residual(8), _Residual(8, 2))
    return nn.Sequential(
        stem, stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 5)
    )


def _vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for given, made in ((3, 8), (8, 8)):
        layers += [
            nn.Conv2d(given, made, 3, padding=1),
            nn.BatchNorm2d(made),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ]
    head = nn.Sequential(nn.Flatten(), nn.Linear(128, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 5))
    return nn.Sequential(nn.Sequential(*layers), nn.Identity(), head)


class _Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(width, 4, 1)
        self.expand = nn.Conv2d(4, width, 1)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True)))))


class _Inverted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, 16, 1), nn.BatchNorm2d(16), nn.Hardswish(inplace=True))
        self.deep = nn.Sequential(
            nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.BatchNorm2d(16), nn.ReLU6(inplace=True)
        )
        self.gate = _Gate(16)
        self.project = nn.Sequential(nn.Conv2d(16, width, 1), nn.BatchNorm2d(width), nn.Identity())
        self.drop = _DropPath()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.project(self.gate(self.deep(self.expand(x)))))


class _Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(3, 4, 1))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cat([self.one(x), self.three(x), self.pool(x)], 1)
        return self.head(y.mean((2, 3))), y


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a = self.down1(x).relu()
        b = self.up(self.down2(self.pool(a)).relu())
        return {"mask": self.out(torch.cat([a, b], 1)), "features": b}


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 12, num_layers=2, batch_first=True, bidirectional=True)  # type: ignore[call-arg]
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y, state = self.rnn(x)
        return self.head(y), state


class _Attention(nn.Module):
    """Returns a pair, the second of which was made first."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)
        return self.proj(weights @ v), weights


class _Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))[0]
        return x + self.mlp(self.norm2(x))


class _Stack(nn.Module):
    """Blocks run plainly, under checkpoints, under autocast, or without gradients."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(16, 40, bias=False)
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.how in ("reentrant", "checkpoint"):
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
            elif self.how == "autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    x = block(x)
            elif self.how == "no_grad":
                with torch.no_grad():
                    x = block(x)
            else:
                x = block(x)
        return self.head(x.float())


class _Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )
        self.lora_dropout = nn.Identity()
        self.scaling = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling


def _adapted() -> nn.Module:
    model = _Stack()
    for block in model.blocks:
        block.attention.qkv = _Lora(block.attention.qkv)
        block.mlp[0] = _Lora(block.mlp[0])
    return model


class _Experts(nn.Module):
    """A gate that returns scores and choices, and experts that are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = _Chooser()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share, best = self.gate(x)
        y = sum(share[:, n : n + 1] * expert(x) for n, expert in enumerate(self.experts))
        return y, best  # type: ignore[return-value]


class _Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x)
        best = scores.argmax(-1)
        return scores.softmax(-1), best


class _Shared(nn.Module):
    """One module under two names, one that is called three times, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a
        self.often, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh())
        for _ in range(3):
            x = self.often(x).relu()
        return x


class _Swapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Reversed()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner(x)
        return a - b


class _Reversed(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b = x * 2
        a = x + 1
        return a, b


class _Norm(nn.Module):
    """A root mean square norm that goes over float32, which changes nothing in a float32 model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.fc, self.n2 = _Norm(), nn.Linear(8, 8), _Norm()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.n2(self.fc(self.n1(x)))


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.yes, self.no = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if (
            not torch.compiler.is_compiling()
        ):  # eager `torch.cond` compiles, and takes no hooks that keep anything
            return self.yes(x).relu() if x.sum() > 0 else self.no(x).tanh()  # type: ignore[no-any-return]
        return torch.cond(x.sum() > 0, lambda t: self.yes(t).relu(), lambda t: self.no(t).tanh(), (x,))  # type: ignore[no-any-return]


class _Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.cosine_similarity(self.tower(left), self.tower(right))


class _Listening(nn.Module):
    """torch.nn's own attention, with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x)
        return self.norm(x + y) * weights.mean()


def _quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


def _transformer() -> nn.Module:
    return nn.Transformer(16, 2, 2, 2, 32, batch_first=True)


def _autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.1, True), nn.GroupNorm(2, 8), nn.Dropout2d(0.1)
        ),
        nn.Sequential(nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Sigmoid()),
    )


def _mixer() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 4),
        nn.Flatten(2),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.AdaptiveAvgPool1d(1),
    )


def _images(size: int = 16) -> tuple[Tensor]:
    return (torch.randn(2, 3, size, size),)


def _rows() -> tuple[Tensor]:
    return (torch.randn(4, 8),)


def _steps() -> tuple[Tensor]:
    return (torch.randn(2, 5, 8),)


def _tokens() -> tuple[Tensor]:
    return (torch.randint(0, 40, (2, 6)),)


def _of(make: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, ...]]) -> Callable[[], Built]:
    return lambda: (make(), inputs(), {})


_WRITTEN_HERE: dict[str, Callable[[], Built]] = {
    "mlp": _of(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)), _rows),
    "resnet, by hand": _of(_resnet, _images),
    "vgg": _of(_vgg, _images),
    "mobilenet_v3": _of(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), _Inverted(8), _Inverted(8)), _images),
    "inception": _of(_Inception, _images),
    "unet": _of(_UNet, _images),
    "autoencoder": _of(_autoencoder, _images),
    "mixer": _of(_mixer, _images),
    "rnn": _of(lambda: _Recurrent(nn.RNN), _steps),
    "gru": _of(lambda: _Recurrent(nn.GRU), _steps),
    "lstm": _of(lambda: _Recurrent(nn.LSTM), _steps),
    "gpt": _of(_Stack, _tokens),
    "gpt, checkpoint": _of(lambda: _Stack("checkpoint"), _tokens),
    "gpt, reentrant checkpoint": _of(lambda: _Stack("reentrant"), _tokens),
    "gpt, autocast": _of(lambda: _Stack("autocast"), _tokens),
    "gpt, no_grad": _of(lambda: _Stack("no_grad"), _tokens),
    "gpt, LoRA": _of(_adapted, _tokens),
    "gpt, DataParallel": _of(lambda: nn.DataParallel(_Stack()), _tokens),
    "experts": _of(_Experts, _rows),
    "shared": _of(_Shared, _rows),
    "swapped": _of(_Swapped, _rows),
    "rms norm": _of(_Normed, _rows),
    "branching": _of(_Branching, _rows),
    "siamese": _of(_Siamese, lambda: (*_rows(), *_rows())),
    "multihead attention": _of(_Listening, lambda: (torch.randn(2, 5, 16),)),
    "encoder": _of(_encoder, lambda: (torch.randn(2, 5, 16),)),
    "transformer": _of(_transformer, lambda: (torch.randn(2, 5, 16), torch.randn(2, 4, 16))),
    "quantized": _of(_quantized, _rows),
}  # fmt: skip

ARCHITECTURES: dict[str, Callable[[], Built]] = {**_WRITTEN_HERE, **IMAGES, **BENT, **HUGGING_FACE}


def build(name: str) -> Built:
    """An architecture in evaluation, the same weights and inputs each time."""
    torch.manual_seed(0)
    model, args, kwargs = ARCHITECTURES[name]()
    return model.eval(), args, kwargs
