"""``Quantiles``: any quantile of all values to a promised accuracy, from a sketch that merges exactly.

The sketch counts values in bins whose width is a fixed share of where they lie (the idea of DDSketch), on
the grid of `octaves`. Sketches that adapt to the data (KLL, t-digest) are smaller, but what they answer
depends on how the stream was cut; these counts only add up, so that every split over micro-batches and
ranks gives the same bits. It guarantees:
- a quantile is within ``accuracy`` of the value of that rank, relatively, for magnitudes from 2**-64 to
  2**64;
- below that it is 0, and the ends, 0 and 1, are exact;
- NaN and infinities are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.measuring import measure
from torchtap.reduce.octaves import OctaveGrid
from torchtap.reduce.readable import readable_real
from torchtap.reduce.transforms import outside_transforms

__all__ = ["Quantiles"]

_FINEST = 10  # bits of an octave; its sketch has 2 MiB


@final
@dataclass(frozen=True)
class Quantiles(Reduction[tuple[Tensor, Tensor]]):
    """The values below which given shares of all values lie.

    at: the shares, from 0 to 1. The result names them in percent: ``p50`` is the median.
    accuracy: how far off an answer may be, relatively; 0.01 takes 128 KiB for each site, 0.02 half of it.

    The value of a share q of n values is the one at rank floor(q * (n - 1)) of the sorted values; without
    any, NaN. The state is the counts, and the smallest and largest value.
    """

    name: ClassVar[str] = "quantiles"
    elementwise: ClassVar[bool] = True

    at: tuple[float, ...] = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
    accuracy: float = 0.01
    _grid: OctaveGrid = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at = tuple(float(share) for share in self.at)
        if not at or not all(0 <= share <= 1 for share in at):
            raise ReductionError(
                f"Quantiles(at={self.at}): give shares between 0 and 1, such as at=(0.5, 0.99)"
            )
        if not 2.0 ** -(_FINEST + 1) <= self.accuracy < 0.5:
            raise ReductionError(
                f"Quantiles(accuracy={self.accuracy}) is out of reach: it can be from "
                f"{2.0 ** -(_FINEST + 1):.1g} to 0.5"
            )
        object.__setattr__(self, "at", at)
        # The middle of a bin is at most half of its width away, and a width is at most 1 / per_octave of
        # its place.
        bits = math.ceil(-math.log2(self.accuracy)) - 1
        object.__setattr__(self, "_grid", OctaveGrid(-64, 64, 1 << bits))

    @outside_transforms
    def update(self, state: tuple[Tensor, Tensor] | None, value: Tensor) -> tuple[Tensor, Tensor]:
        plain = readable_real(value)
        low, high = measure(plain)[6:8]
        seen = (self._grid.count(plain), torch.stack([low, -high]))
        return seen if state is None else self.merge(state, seen)

    def merge(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        counts, ends = (part.to(left[0].device) for part in right)
        return left[0] + counts, torch.minimum(left[1], ends)

    def result(self, state: tuple[Tensor, Tensor]) -> Result:
        # All of it where the counts are: a number that the host reads would make it wait for the device.
        counts, (low, negated_high) = state[0][:-2], state[1]
        high = -negated_high
        upto = counts.cumsum(0)
        total = upto[-1]
        shares = torch.tensor(self.at, dtype=low.dtype, device=low.device)
        ranks = (shares * (total - 1)).floor().to(torch.int64)
        middles = self._middles.to(low.device, low.dtype)
        places = torch.searchsorted(upto, ranks, right=True).clamp(max=len(middles) - 1)
        found = torch.minimum(torch.maximum(middles[places], low), high)
        found = torch.where(ranks == 0, low, found)
        found = torch.where(ranks == total - 1, high, found)
        found = torch.where(total == 0, torch.nan, found)
        return {
            f"p{round(100 * share, 10):g}": value
            for share, value in zip(self.at, found.unbind(), strict=True)
        }

    def to_merge(self, state: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The sketch as whole numbers: bins that hold anything and their counts, behind the ends and the fineness."""
        counts, ends = state[0].to("cpu"), state[1].to("cpu", torch.float64)
        places = counts.nonzero().reshape(-1)
        head = torch.stack([ends.view(torch.int64), torch.tensor([self._grid.per_octave, 0])], 1)
        return {"sketch": torch.cat([head, torch.stack([places, counts[places]])], 1)}

    @cached_property
    def _middles(self) -> Tensor:
        """A number in the middle of each bin; beyond the grid, one that the ends of the data will limit."""
        edges = self._grid.edges
        beyond = edges.new_tensor([math.inf])
        return torch.cat([-beyond, (edges[:-1] + edges[1:]) / 2, beyond])

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "at": list(self.at), "accuracy": self.accuracy}
