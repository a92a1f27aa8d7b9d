"""``Stats``: the twelve statistics of all values, from one pass over each.

Moments, extremes and norms are of the finite values; NaN and infinities are counted. Complex values count by
their magnitude. Merging is exact up to float64 rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.measuring import measure
from torchtap.reduce.moments import STATISTICS, WIDTH, finish, merge_states
from torchtap.reduce.stats_block import StatsBlock
from torchtap.reduce.transforms import outside_transforms

__all__ = ["Stats"]


@final
@dataclass(frozen=True)
class Stats(Reduction[Tensor]):
    """Count, mean, std, min, max, absmax, l1, l2, rms, share of zeros, NaN and inf counts.

    The state is a tensor of ``moments.WIDTH`` numbers on the device of the values.
    """

    name: ClassVar[str] = "stats"
    elementwise: ClassVar[bool] = True
    block: ClassVar[type[StatsBlock]] = StatsBlock

    @outside_transforms
    def update(self, state: Tensor | None, value: Tensor) -> Tensor:
        seen = measure(value)
        return seen if state is None else merge_states(state, seen.to(state.device))

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        return merge_states(left, right.to(left.device))

    def result(self, state: Tensor) -> Result:
        numbers = finish(state.to("cpu").to(torch.float64).reshape(1, WIDTH).numpy())[0]
        return dict(zip(STATISTICS, numbers.tolist(), strict=True))

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name}
