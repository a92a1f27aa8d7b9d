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
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["ROW", "Array", "Sketch", "epsilon", "sketch", "sketch_rows"]

PROJECTIONS, POINTS = 16, 24
ROW = 3 + PROJECTIONS + POINTS
Array = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Sketch:
    """Everything that is kept of a tensor: its norm, two counts, projections, and a sample of its elements."""

    dtype: str
    shape: tuple[int, ...]
    row: Array

    @property
    def norm(self) -> float:
        """Return the L2 norm."""
        return float(self.row[0])

    @property
    def infinite(self) -> int:
        """Return how many elements are not finite."""
        return int(self.row[1])

    @property
    def nans(self) -> int:
        """Return how many elements are NaN."""
        return int(self.row[2])

    def distance(self, other: Sketch) -> float:
        """Return the estimated L2 distance to another sketch, relative to this one's norm."""
        if self.shape != other.shape or self.infinite != other.infinite:
            return math.inf
        apart = _size(self.row - other.row)
        return 0.0 if apart == 0.0 else apart / self.norm if self.norm > 0 else math.inf

    def minus(self, other: Sketch) -> Sketch:
        """Return the sketch of the difference of two tensors. Its norm is estimated."""
        row = self.row - other.row
        row[:3] = _size(row), self.infinite, self.nans
        return Sketch(self.dtype, self.shape, row)


def _size(row: Array) -> float:
    return float(np.sqrt(np.mean(row[3 : 3 + PROJECTIONS] ** 2)))


def epsilon(dtype: str) -> float:
    """Return the relative size of one unit in the last place; 0 for integers and booleans."""
    found: Any = getattr(torch, dtype, None)
    rounds = found is not None and (found.is_floating_point or found.is_complex)
    return float(torch.finfo(found).eps) if rounds else 0.0


def sketch(value: Tensor) -> Sketch:
    """Return the sketch of a tensor. The tensor is only read."""
    with torch.no_grad():
        flat = _flat(value)
        grid, infinite, nans = _grid(flat)
        rows, columns = _signs(grid.shape[0], "rows"), _signs(grid.shape[1], "columns")
        projections = ((grid @ columns) * rows).sum(0)
        points = grid.reshape(-1)[_places(max(len(flat), 1))]
        norm = torch.linalg.vector_norm(grid)
        row = torch.cat([torch.tensor([norm, infinite, nans], dtype=torch.float64), projections, points])
    return Sketch(str(value.dtype).removeprefix("torch."), tuple(value.shape), row.numpy())


def sketch_rows(value: Tensor) -> Array:
    """Return one short sketch for each row of a batch, so that a reordered batch is recognised."""
    with torch.no_grad():
        flat = _flat(value).double().reshape(value.shape[0], -1)
        found: Array = (flat @ _signs(flat.shape[1], "columns")[:, :4]).numpy()
        return found


def _flat(value: Tensor) -> Tensor:
    plain = value.detach()
    plain = plain.dequantize() if plain.is_quantized else plain
    plain = (plain if plain.layout == torch.strided else plain.to_dense()).cpu()
    return (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).reshape(-1)


def _grid(flat: Tensor) -> tuple[Tensor, int, int]:
    """Return the elements in float64 as a nearly square matrix, and how many are not finite, and NaN."""
    width = 1 << max(len(flat) - 1, 0).bit_length() // 2
    grid = torch.zeros(max(-(-len(flat) // width), 1) * width, dtype=torch.float64)
    grid[: len(flat)] = flat
    if math.isfinite(float(grid.sum())):  # cheaper than a look at each element
        return grid.view(-1, width), 0, 0
    bad = ~torch.isfinite(grid)
    most = float(torch.where(bad, 0.0, grid).abs().max())
    # Infinities and NaN count by their place and their sign.
    plain = torch.nan_to_num(grid, nan=3 * most + 3, posinf=2 * most + 2, neginf=-2 * most - 2)
    return plain.view(-1, width), int(bad.sum()), int(torch.isnan(grid).sum())


@lru_cache(maxsize=64)
def _signs(length: int, side: str) -> Tensor:
    """Return random signs, the same in every process: the bits of a hash."""
    count = length * PROJECTIONS
    raw = hashlib.shake_128(f"torchtap {side}".encode()).digest(-(-count // 8))
    signs = np.unpackbits(np.frombuffer(raw, np.uint8))[:count].astype(np.float64) * 2 - 1
    return torch.from_numpy(signs.reshape(length, PROJECTIONS))


@lru_cache(maxsize=256)
def _places(size: int) -> Tensor:
    """Return the positions of the sampled elements."""
    numbers = np.frombuffer(hashlib.shake_128(b"torchtap points").digest(8 * POINTS), np.uint64)
    return torch.from_numpy((numbers % np.uint64(size)).astype(np.int64))
