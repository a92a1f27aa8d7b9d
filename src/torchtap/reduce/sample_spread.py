"""``SampleSpread``: how much of a value differs from sample to sample.

A model whose answer no longer depends on its input has a spread of zero, however its values are spread otherwise. The
samples are the indices of dimension 0. Of large values some features are looked at, evenly spread over all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.readable import readable_real
from torchtap.reduce.transforms import outside_transforms

__all__ = ["SampleSpread"]


@final
@dataclass(frozen=True, slots=True)
class SampleSpread(Reduction[Tensor]):
    """``between``: the part of the mean square that differs between samples, from 0 to 1; NaN for fewer than four.

    features: at most so many are looked at. Values that are not finite count as zero.
    """

    name: ClassVar[str] = "sample_spread"

    features: int = 1024

    @outside_transforms
    def update(self, state: Tensor | None, value: Tensor) -> Tensor:
        plain = readable_real(value)
        if not plain.dim():  # a loss among a model's outputs: one sample of one feature
            plain = plain.reshape(1, 1)
        flat = plain.reshape(len(plain), -1) if plain.numel() else plain.new_zeros((0, 1))
        stride = max(1, -(-flat.shape[1] // self.features))
        some = torch.nan_to_num(flat[:, ::stride].double(), 0.0, 0.0, 0.0)
        seen = torch.stack([torch.full_like(some[:1], len(some)).sum(0) if len(some) else some.sum(0),
                            some.sum(0), some.square().sum(0)])  # fmt: skip
        return seen if state is None else self.merge(state, seen)

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        both = min(left.shape[1], right.shape[1])  # sequences of different lengths share their beginning
        return left[:, :both] + right[:, :both].to(left.device)

    def result(self, state: Tensor) -> Result:
        count, total, squares = state
        within = squares.sum() / count.sum().clamp_min(1)
        middle = total / count.clamp_min(1)
        between = (squares / count.clamp_min(1) - middle.square()).clamp_min(0).mean()
        share = torch.where(within > 0, between / within, torch.zeros_like(within))
        few = count.max() < 4 if count.numel() else torch.tensor(True)
        return {"between": torch.where(few, torch.full_like(share, torch.nan), share).cpu()}

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "features": self.features}
