"""Statistics of a layer's outputs over an epoch, as if all batches were one tensor, with no batch kept.

It guarantees: the numbers equal those of the concatenation up to float64 rounding, however long the epoch;
memory does not grow with the number of batches.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from torchtap.reduce.moments import STATISTICS, WIDTH, finish, measure_with_torch, merge_states
from torchtap.reduce.readable import readable_real

__all__ = ["EpochStatistics"]

_PIECE = 1 << 20  # elements that are looked at at once


@final
class EpochStatistics:
    """Of one tensor a batch: over all elements, and for each position over the first dimension."""

    def __init__(self) -> None:
        self._state: Tensor | None = None
        self._over_first: _OverFirst | None = None
        self._one_shape = True
        self.rows = 0
        self.shape: list[int] = []

    def add(self, value: Tensor) -> None:
        """One batch more."""
        # In float64 throughout: what is kept of an epoch is to be what two passes over it would give.
        seen = measure_with_torch(readable_real(value)).to("cpu", torch.float64)
        self._state = seen if self._state is None else merge_states(self._state, seen)
        if value.dim() == 0 or value.is_complex():
            self._one_shape = False
        elif self._one_shape:
            if self._over_first is None:
                self._over_first = _OverFirst(value)
            elif self._over_first.shape != value.shape[1:]:
                self._one_shape, self._over_first = False, None
            else:
                self._over_first.add(value)
        self.rows += value.shape[0] if value.dim() else 1
        self.shape = [self.rows, *value.shape[1:]]

    def result(self) -> dict[str, Any]:
        """The twelve numbers, and ``over_first_dimension`` where every batch had one shape, else None."""
        if self._state is None:
            return {}
        each = self._over_first.result() if self._over_first is not None else None
        numbers = finish(self._state.reshape(1, WIDTH).numpy())[0].tolist()
        return {**dict(zip(STATISTICS, numbers, strict=True)), "over_first_dimension": each}


@final
class _OverFirst:
    """Mean, std, min and max over the first dimension: Chan's merge, in float64, a few columns at a time."""

    def __init__(self, first: Tensor) -> None:
        self.shape = first.shape[1:]
        width = max(1, self.shape.numel())
        self._count = 0
        self._mean = torch.zeros(width, dtype=torch.float64)
        self._squares = torch.zeros(width, dtype=torch.float64)
        self._least: Tensor | None = None
        self._most: Tensor | None = None
        self.add(first)

    def add(self, value: Tensor) -> None:
        rows = value.detach().reshape(value.shape[0], -1)
        if rows.numel() == 0:
            return
        least, most = rows.amin(0), rows.amax(0)
        self._least = least if self._least is None else torch.minimum(self._least, least)
        self._most = most if self._most is None else torch.maximum(self._most, most)
        count, more = self._count, len(rows)
        step = max(1, _PIECE // more)
        for start in range(0, rows.shape[1], step):
            piece = rows[:, start : start + step].double()
            mean = piece.mean(0)
            squares = (piece - mean).square_().sum(0)
            known = slice(start, start + step)
            distance = mean - self._mean[known]
            self._mean[known] += distance * (more / (count + more))
            self._squares[known] += squares + distance.square() * (count * more / (count + more))
        self._count = count + more

    def result(self) -> dict[str, Any]:
        if self._least is None or self._most is None:
            return {}
        spread = self._squares / (self._count - 1) if self._count > 1 else self._squares * torch.nan
        whole = {"mean": self._mean, "std": spread.sqrt(), "min": self._least, "max": self._most}
        return {name: values.reshape(self.shape) for name, values in whole.items()}
