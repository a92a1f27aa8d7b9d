"""A few numbers of a tensor by which two sites are known to hold the same value, whatever their names."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchtap.comparison.measure.chunks import as_real

__all__ = ["signature"]

_ELEMENTS = 1 << 20  # of a larger tensor so many, evenly spaced, stand for all


def signature(value: Tensor) -> tuple[float, ...] | None:
    """``(size, three weighted sums)``, all on one scale; ``None`` for what has no finite elements or is constant.

    The weights differ from place to place, so that the same elements in another order have another signature.
    """
    flat = as_real(value).reshape(-1)
    if flat.numel() > _ELEMENTS:
        flat = flat[:: flat.numel() // _ELEMENTS]
    wide = flat.to("cpu", torch.float64)
    wide = torch.where(torch.isfinite(wide) & (wide.abs() < 1e29), wide, torch.zeros((), dtype=torch.float64))
    size = float(wide.norm())
    if not 0.0 < size < math.inf or wide.numel() < 2 or bool((wide == wide[0]).all()):
        return None
    place = torch.arange(1, wide.numel() + 1, dtype=torch.float64)
    sums = (float((wide * torch.sin(place * rate)).sum()) for rate in (1.0, 0.1, 0.01))
    return (size, *sums)
