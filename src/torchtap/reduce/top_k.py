"""``TopK``: the most extreme elements and where they are.

Of equal elements the first counts, so that the answer does not depend on how the values were split (on
devices other than the CPU, where looking would mean waiting, torch decides between equals). NaN is never
among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.readable import readable_real
from torchtap.reduce.transforms import outside_transforms

__all__ = ["TopK"]

_ORDERS = ("abs", "largest", "smallest")


class _Top(NamedTuple):
    values: Tensor
    indices: Tensor
    length: int  # elements seen so far


@final
@dataclass(frozen=True)
class TopK(Reduction[_Top]):
    """The ``k`` elements that come first ``by`` magnitude (``"abs"``), ``"largest"`` or ``"smallest"``.

    The result has ``values``, first one first, and ``indices``: flat, and counted on from one value to the
    next as if they had been one after the other. Fewer than k elements give fewer.
    """

    name: ClassVar[str] = "topk"

    k: int = 10
    by: str = "abs"

    def __post_init__(self) -> None:
        if self.k < 1 or self.by not in _ORDERS:
            raise ReductionError(
                f"TopK(k={self.k}, by={self.by!r}): k is at least 1 and by is one of {_ORDERS}"
            )

    @outside_transforms
    def update(self, state: _Top | None, value: Tensor) -> _Top:
        flat = readable_real(value).reshape(-1)
        if flat.dtype is torch.bool:
            flat = flat.to(torch.uint8)
        chosen = self._first(flat)
        seen = _Top(flat[chosen], chosen, flat.numel())
        return seen if state is None else self.merge(state, seen)

    def merge(self, left: _Top, right: _Top) -> _Top:
        device = left.values.device
        values = torch.cat([left.values, right.values.to(device)])
        indices = torch.cat([left.indices, right.indices.to(device) + left.length])
        # Of equals the one from the left is first: it is first in the concatenation too.
        chosen = self._first(values)
        return _Top(values[chosen], indices[chosen], left.length + right.length)

    def result(self, state: _Top) -> Result:
        values, indices = state.values.to("cpu"), state.indices.to("cpu")
        numbers = ~values.isnan()
        return {"values": values[numbers], "indices": indices[numbers]}

    def spec(self) -> dict[str, Any]:
        return {"reduction": self.name, "k": self.k, "by": self.by}

    def _first(self, flat: Tensor) -> Tensor:
        """Where the first k elements are, in order."""
        key = self._key(flat)
        if flat.device.type != "cpu":
            return torch.topk(key.nan_to_num(-torch.inf), min(self.k, flat.numel())).indices
        numbers = (~key.isnan()).nonzero().reshape(-1) if key.isnan().any() else None
        if numbers is not None:
            key = key[numbers]
        k = min(self.k, key.numel())
        if k == 0:
            return torch.zeros(0, dtype=torch.int64)
        last = torch.topk(key, k).values[-1]
        ahead = (key > last).nonzero().reshape(-1)
        level = (key == last).nonzero().reshape(-1)[: k - len(ahead)]
        candidates = torch.cat([ahead, level]).sort().values
        chosen = candidates[torch.sort(key[candidates], descending=True, stable=True).indices]
        return chosen if numbers is None else numbers[chosen]

    def _key(self, flat: Tensor) -> Tensor:
        """Numbers that are the larger the earlier an element comes."""
        if not flat.is_floating_point():
            # Wide enough that no magnitude and no negation overflows. (Of int64 beyond 2**53, float64 takes
            # neighbours for equal.)
            flat = flat.double() if flat.dtype is torch.int64 else flat.long()
        return {"abs": flat.abs, "largest": flat.clone, "smallest": flat.neg}[self.by]()
