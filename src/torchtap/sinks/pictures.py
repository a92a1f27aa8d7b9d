"""Attention maps as one grey picture: all heads of the first sequence, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attention_picture"]

_LARGEST = 256  # pixels of one head's map; a longer sequence is thinned


def attention_picture(maps: Tensor) -> npt.NDArray[np.uint8] | None:
    """(…, heads, queries, keys) → a picture, each head from black (0) to white (its largest); None if not maps."""
    if maps.ndim < 2 or maps.numel() == 0 or maps.is_complex():
        return None
    while maps.ndim > 3:
        maps = maps[0]
    if maps.ndim == 2:
        maps = maps[None]
    rows, columns = (-(-size // _LARGEST) for size in maps.shape[-2:])
    thin = np.nan_to_num(maps[:, ::rows, ::columns].float().numpy())
    heads, height, width = thin.shape
    across = int(np.ceil(np.sqrt(heads)))
    down = -(-heads // across)
    picture = np.zeros((down * (height + 1) - 1, across * (width + 1) - 1), np.uint8)
    for head in range(heads):
        top, left = head // across * (height + 1), head % across * (width + 1)
        largest = max(float(thin[head].max()), 1e-12)
        shades = np.clip(thin[head] / largest, 0, 1) * 255
        picture[top : top + height, left : left + width] = shades.astype(np.uint8)
    return picture
