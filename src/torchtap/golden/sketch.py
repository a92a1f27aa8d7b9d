"""Sketch a tensor: a few numbers from which the distance of two tensors is known without keeping either.

A sketch holds projections of all elements on random signs. They are linear, and the mean square of the differences of
two tensors' projections estimates the square of their L2 distance: one wrong element is seen, and so is a small change
of all of them. The signs are made from a hash, so they are the same on every machine and with every version.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtap.comparison.values import value_of_tensor

__all__ = ["ROW", "Sketch", "sketch"]

PROJECTIONS = 16
ROW = 3 + PROJECTIONS
Array = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Sketch:
    """Everything that is kept of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    row: Array  # the L2 norm, how many elements are not finite, and NaN; projections
    parent: str | None = None  # the module whose code passed the value; None: the caller of the model
    digest: str | None = None  # a checksum of all bytes; of weights only

    norm = property(lambda self: float(self.row[0]))
    infinite = property(lambda self: int(self.row[1]))
    nans = property(lambda self: int(self.row[2]))

    def distance(self, other: Sketch) -> float:
        """Return the estimated L2 distance to another sketch, relative to this one's norm."""
        if self.shape != other.shape or self.infinite != other.infinite:
            return math.inf
        apart = self.minus(other).norm
        return 0.0 if apart == 0.0 else apart / self.norm if self.norm > 0 else math.inf

    def minus(self, other: Sketch) -> Sketch:
        """Return the sketch of the difference of two tensors. Its norm is estimated."""
        row = self.row - other.row
        row[:3] = np.sqrt(np.mean(row[3:] ** 2)), self.infinite, self.nans
        return Sketch(self.dtype, self.shape, row)


def sketch(value: Tensor) -> Sketch:
    """Return the sketch of a tensor. The tensor is only read."""
    plain = value_of_tensor(
        torch.cat([each.reshape(-1) for each in value.unbind()]) if value.is_nested else value
    )
    flat = torch.from_numpy(np.ascontiguousarray(plain.real())).reshape(-1)
    width = 1 << max(len(flat) - 1, 0).bit_length() // 2  # of a nearly square matrix
    grid = torch.zeros(max(-(-len(flat) // width), 1), width, dtype=torch.float64)
    grid.view(-1)[: len(flat)] = flat
    infinite = nans = 0
    if not math.isfinite(float(grid.sum())):  # cheaper than a look at each element
        bad = ~torch.isfinite(grid)
        infinite, nans = int(bad.sum()), int(torch.isnan(grid).sum())
        most = float(torch.where(bad, 0.0, grid).abs().max())
        # Infinities and NaN count by their place and their sign.
        grid = torch.nan_to_num(grid, nan=3 * most + 3, posinf=2 * most + 2, neginf=-2 * most - 2)
    rows, columns = _signs(grid.shape[0], "rows"), _signs(width, "columns")
    head = torch.tensor([torch.linalg.vector_norm(grid), infinite, nans], dtype=torch.float64)
    return Sketch(plain.dtype, plain.shape, torch.cat([head, ((grid @ columns) * rows).sum(0)]).numpy())


@lru_cache(maxsize=64)
def _signs(length: int, side: str) -> Tensor:
    """Return random signs, the same in every process: the bits of a hash."""
    count = length * PROJECTIONS
    raw = hashlib.shake_128(f"torchtap {side}".encode()).digest(-(-count // 8))
    signs = np.unpackbits(np.frombuffer(raw, np.uint8))[:count].astype(np.float64) * 2 - 1
    return torch.from_numpy(signs.reshape(length, PROJECTIONS))
