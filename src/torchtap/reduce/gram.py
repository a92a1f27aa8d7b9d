"""``Gram``: the products of all pairs of features, summed over all rows: XᵀX of the last dimension.

It is what covariance, whitening, CKA and probes start from, and it adds up over batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.readable import readable_real
from torchtap.reduce.transforms import outside_transforms

__all__ = ["Gram"]


@final
@dataclass(frozen=True)
class Gram(Reduction[tuple[Tensor, int]]):
    """``gram`` (features × features) and ``rows``, with every dimension but the last taken as rows.

    dtype: what it is computed and kept in, ``"float64"`` or, faster and half as large, ``"float32"``.
    """

    name: ClassVar[str] = "gram"

    dtype: str = "float64"

    def __post_init__(self) -> None:
        spelled = str(self.dtype).removeprefix("torch.")
        if spelled not in ("float32", "float64"):
            raise ReductionError(f"Gram(dtype={self.dtype!r}): sums are kept in 'float32' or 'float64'")
        object.__setattr__(self, "dtype", spelled)

    @outside_transforms
    def update(self, state: tuple[Tensor, int] | None, value: Tensor) -> tuple[Tensor, int]:
        if value.is_complex():
            raise ReductionError(
                f"Gram has no rule for complex values ({value.dtype}); use Metric with a function that "
                "turns them into real features, such as torch.view_as_real"
            )
        plain = readable_real(value)
        features = plain.shape[-1] if plain.dim() else 1
        rows = plain.reshape(plain.numel() // features if features else 0, features)
        rows = rows.to(torch.float32 if self.dtype == "float32" else torch.float64)
        seen = (rows.T @ rows, rows.shape[0])
        return seen if state is None else self.merge(state, seen)

    def merge(self, left: tuple[Tensor, int], right: tuple[Tensor, int]) -> tuple[Tensor, int]:
        if left[0].shape != right[0].shape:
            raise ReductionError(
                f"Gram cannot add values of {left[0].shape[0]} and of {right[0].shape[0]} features: the last "
                "dimension has to stay the same"
            )
        return left[0] + right[0].to(left[0].device), left[1] + right[1]

    def result(self, state: tuple[Tensor, int]) -> Result:
        return {"gram": state[0].to("cpu"), "rows": float(state[1])}

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "dtype": self.dtype}
