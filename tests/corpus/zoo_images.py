"""Architectures on images in the styles of others (timm, torchvision …)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["IMAGES"]

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class _DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if not self.training else x * (torch.rand(x.shape[0], *(1,) * (x.ndim - 1)) > 0.1)


class _LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul(self.gamma)


class _ConvNeXtBlock(nn.Module):
    """Depthwise, then channels last, norm, mlp with a response normalisation, back, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(width, 2 * width), "act": nn.GELU(), "grn": _Response(2 * width),
             "fc2": nn.Linear(2 * width, width)}
        )  # fmt: skip
        self.ls, self.shortcut, self.drop_path = _LayerScale(width), nn.Identity(), _DropPath()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.conv_dw(x).permute(0, 2, 3, 1)
        x = self.norm(x)
        for step in self.mlp.values():
            x = step(x)
        x = self.ls(x).permute(0, 3, 1, 2)
        return self.drop_path(x) + self.shortcut(shortcut)  # type: ignore[no-any-return]


class _Response(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(p=2, dim=(1, 2), keepdim=True)
        return x + torch.addcmul(self.bias, self.weight, x * (size / (size.mean(-1, keepdim=True) + 1e-6)))


class _WindowAttention(nn.Module):
    """Attention in shifted windows with a table of relative positions, as Swin has."""

    def __init__(self, width: int = 8, window: int = 4, shift: int = 0) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.proj_drop, self.attn_drop = nn.Dropout(0.1), nn.Dropout(0.0)
        self.window, self.shift = window, shift
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, 2) * 0.1)
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(
            1
        )
        away = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", away[..., 0] * (2 * window - 1) + away[..., 1])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, height, width, channels = x.shape
        size = self.window
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), dims=(1, 2))
        parts = x.view(batch, height // size, size, width // size, size, channels)
        parts = parts.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, channels)
        qkv = self.qkv(parts).reshape(parts.shape[0], -1, 3, 2, channels // 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        bias = self.table[self.index.view(-1)].view(size * size, size * size, -1).permute(2, 0, 1)
        weights = (q @ k.transpose(-2, -1) * 0.5 + bias.unsqueeze(0)).softmax(-1)
        mixed = (self.attn_drop(weights) @ v).transpose(1, 2).reshape(parts.shape)
        mixed = self.proj_drop(self.proj(mixed))
        whole = mixed.view(batch, height // size, width // size, size, size, channels).permute(
            0, 1, 3, 2, 4, 5
        )
        whole = whole.reshape(batch, height, width, channels)
        return torch.roll(whole, (self.shift, self.shift), dims=(1, 2)) if self.shift else whole


class _Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.ModuleList([_WindowAttention(), _WindowAttention(shift=2)])
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
        return x.mean((1, 2))


class _Excite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.pool, self.fc1, self.fc2 = (
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, 2, 1),
            nn.Conv2d(2, width, 1),
        )
        self.act, self.gate = nn.ReLU(inplace=True), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))  # type: ignore[no-any-return]


class _Dense(nn.Module):
    """Every layer is given all that came before, in a list, as DenseNet does; one in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {f"layer{n}": nn.Sequential(
                OrderedDict(norm=nn.BatchNorm2d(4 + 4 * n), relu=nn.ReLU(inplace=True),
                            conv=nn.Conv2d(4 + 4 * n, 4, 3, padding=1))
            ) for n in range(3)}
        )  # fmt: skip
        self.stem, self.excite = nn.Conv2d(3, 4, 1), _Excite(16)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers.values():
            features.append(layer(torch.cat(features, 1)))
        return self.excite(torch.cat(features, 1))  # type: ignore[no-any-return]


class _Shuffle(nn.Module):
    """Channels split, one half convolved, both shuffled, as ShuffleNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left, right = x.chunk(2, dim=1)
        y = torch.cat((left, self.branch(right)), 1)
        batch, channels, height, width = y.shape
        return y.view(batch, 2, channels // 2, height, width).transpose(1, 2).flatten(1, 2)


class _Pyramid(nn.Module):
    """Lateral and top-down paths, the result in an ordered dictionary, as detection models have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)])
        self.inner = nn.ModuleList([nn.Conv2d(8, 4, 1) for _ in range(2)])
        self.layer = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = []
        for step in self.body:
            x = step(x).relu()
            found.append(x)
        last = self.inner[1](found[1])
        results = [self.layer[1](last)]
        lateral = self.inner[0](found[0])
        last = lateral + F.interpolate(last, size=lateral.shape[-2:], mode="nearest")
        results.insert(0, self.layer[0](last))
        results.append(F.max_pool2d(results[-1], 1, 2, 0))
        return OrderedDict((f"p{n}", each) for n, each in enumerate(results))


class _Deformable(nn.Module):
    """Reads where it decides to: sampling by a grid, by gathered indices, by a scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.value, self.out = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x)
        offset = self.offset(x).tanh().permute(0, 2, 3, 1)
        sampled = F.grid_sample(value, offset, align_corners=False)
        flat = sampled.flatten(2).transpose(1, 2)
        top = flat.norm(dim=-1).topk(8, dim=1).indices
        chosen = torch.gather(flat, 1, top.unsqueeze(-1).expand(-1, -1, 4))
        kept = torch.zeros_like(flat).scatter(1, top.unsqueeze(-1).expand(-1, -1, 4), self.out(chosen))
        kept[:, 0] += 1.0
        return kept.sum(1)


def _images(size: int = 16) -> tuple[Tensor]:
    return (torch.randn(2, 3, size, size),)


def _of(
    make: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, ...]] = _images
) -> Callable[[], Built]:
    return lambda: (make(), inputs(), {})


IMAGES: dict[str, Callable[[], Built]] = {
    "convnext, by hand": _of(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 4, 4), _ConvNeXtBlock(8), _ConvNeXtBlock(8))
    ),
    "shifted windows": _of(_Windowed),
    "densenet": _of(_Dense),
    "shufflenet": _of(_Shuffle),
    "pyramid": _of(_Pyramid),
    "deformable": _of(_Deformable, lambda: _images(8)),
}
