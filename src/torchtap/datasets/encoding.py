"""Store rows in a chosen dtype, and measure what that loses.

``float32``, ``bfloat16`` and ``float16`` are casts. ``int8`` and ``float8_e4m3fn`` have one float32 scale for each row,
so that a row's largest element uses the whole range. `SiteStatistics` are sums over the original values, in float64,
and merge by adding; the error is that of the stored rows against the original ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from torchtap.errors import PlanError

__all__ = ["SCALED", "SiteStatistics", "StoredError", "decode", "dtype_of", "encode"]

_NAMES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "fp8": torch.float8_e4m3fn,
}
SCALED = ("int8", "float8_e4m3fn")
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_ELEMENTS_AT_ONCE = 1 << 15  # a float64 copy of them stays in the cache


def dtype_of(given: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that rows are stored in; None is the dtype of the values."""
    if given is None:
        return None
    found = _NAMES.get(given.removeprefix("torch.")) if isinstance(given, str) else given
    if found not in _NAMES.values():
        raise PlanError(f"dtype={given!r}: rows are stored as {', '.join(_NAMES)}, or None as they are")
    return found


def encode(rows: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Return rows as they are stored, and the scale of each row if the dtype has one."""
    if dtype is None or dtype is rows.dtype:
        return rows, None
    largest = _LARGEST.get(dtype)
    if largest is None:
        return rows.to(dtype), None
    values = rows.float()
    scale = values.abs().amax(1) / largest
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = values / scale[:, None]
    if dtype is torch.int8:
        return scaled.round().nan_to_num(0).clamp(-127, 127).to(dtype), scale
    return scaled.clamp(-largest, largest).to(dtype), scale


def decode(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Return stored rows as values: float32 if they have scales, else as they are."""
    return stored if scale is None else stored.float() * scale[:, None]


@final
@dataclass(frozen=True, slots=True)
class StoredError:
    """Error of the stored rows: relative to their norm over all rows, and the largest of any element."""

    relative: float
    largest: float


@final
class SiteStatistics:
    """Statistics of one site over all stored rows. Rows with NaN or infinity count in ``nonfinite`` only."""

    def __init__(self, sums: Mapping[str, Tensor]) -> None:
        self._sums = sums

    @classmethod
    def empty(cls, width: int, covariance: bool) -> SiteStatistics:
        sums = {
            "sum": torch.zeros(width, dtype=torch.float64),
            "square": torch.zeros(width, dtype=torch.float64),
            # rows, rows with NaN or infinity, norm, squared norm, largest norm, squared error, largest error
            "numbers": torch.zeros(7, dtype=torch.float64),
        }
        if covariance:
            sums["gram"] = torch.zeros(width, width, dtype=torch.float64)
        return cls(sums)

    def add(self, rows: Tensor, stored: Tensor | None) -> None:
        """Add rows. ``stored`` is what a reader gets for them; None if that is the same."""
        sums = self._sums
        total, square = torch.zeros_like(sums["sum"]), torch.zeros_like(sums["square"])
        squares = torch.empty(len(rows), dtype=torch.float64)
        step = max(1, _ELEMENTS_AT_ONCE // max(rows.shape[1], 1))
        for start in range(0, len(rows), step):
            values = rows[start : start + step].double()
            total += values.sum(0)
            square += values.square_().sum(0)
            torch.sum(values, 1, out=squares[start : start + step])
        finite = torch.isfinite(squares)
        if not bool(finite.all()):
            sums["numbers"][1] += len(rows) - int(finite.sum())
            if bool(finite.any()):
                self.add(rows[finite], None if stored is None else stored[finite])
            return
        sums["sum"] += total
        sums["square"] += square
        norms, numbers = squares.sqrt(), sums["numbers"]
        numbers[0] += len(rows)
        numbers[2] += norms.sum()
        numbers[3] += squares.sum()
        numbers[4] = torch.maximum(numbers[4], norms.max())
        if "gram" in sums:
            single = rows.float()
            sums["gram"] += (single.T @ single).double()
        if stored is not None:
            error = rows.double() - stored.double()
            numbers[5] += error.square().sum()
            numbers[6] = torch.maximum(numbers[6], error.abs().max())

    def merge(self, other: SiteStatistics) -> SiteStatistics:
        """Return the statistics of both."""
        sums = {name: value + other._sums[name] for name, value in self._sums.items() if name in other._sums}
        for largest in (4, 6):
            sums["numbers"][largest] = torch.maximum(
                self._sums["numbers"][largest], other._sums["numbers"][largest]
            )
        return SiteStatistics(sums)

    def tensors(self, site: str) -> dict[str, Tensor]:
        """Return the sums as tensors of a file."""
        return {f"statistics/{name}/{site}": value for name, value in self._sums.items()}

    @property
    def rows(self) -> int:
        return int(self._sums["numbers"][0])

    @property
    def nonfinite(self) -> int:
        """Number of rows with NaN or infinity."""
        return int(self._sums["numbers"][1])

    @cached_property
    def mean(self) -> Tensor:
        return self._sums["sum"] / max(self.rows, 1)

    @cached_property
    def variance(self) -> Tensor:
        """Variance of each column (of the population)."""
        return (self._sums["square"] / max(self.rows, 1) - self.mean**2).clamp_min(0)

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    @cached_property
    def gram(self) -> Tensor:
        """Sum of the outer products of the rows. Needs a harvest with ``covariance=True``."""
        if "gram" not in self._sums:
            raise PlanError("this folder has no Gram matrix: harvest with covariance=True")
        return self._sums["gram"]

    @cached_property
    def covariance(self) -> Tensor:
        """Covariance of the columns (of the population)."""
        return self.gram / max(self.rows, 1) - torch.outer(self.mean, self.mean)

    @property
    def mean_norm(self) -> float:
        return float(self._sums["numbers"][2]) / max(self.rows, 1)

    @property
    def rms_norm(self) -> float:
        """Square root of the mean squared norm."""
        return math.sqrt(float(self._sums["numbers"][3]) / max(self.rows, 1))

    @property
    def largest_norm(self) -> float:
        return float(self._sums["numbers"][4])

    @property
    def norm_factor(self) -> float:
        """Factor that gives rows the mean norm √width, as sparse autoencoders are trained."""
        return math.sqrt(len(self._sums["sum"])) / self.mean_norm if self.mean_norm else 1.0

    @property
    def error(self) -> StoredError:
        """Error of the stored rows against the original values."""
        norm = float(self._sums["numbers"][3])
        squared = float(self._sums["numbers"][5])
        return StoredError(math.sqrt(squared / norm) if norm else 0.0, float(self._sums["numbers"][6]))

    def __repr__(self) -> str:
        return (
            f"SiteStatistics(rows={self.rows}, mean_norm={self.mean_norm:.4g}, norm_factor={self.norm_factor:.4g}, "
            f"error={self.error.relative:.3g})"
        )
