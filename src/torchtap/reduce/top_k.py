"""``TopK``: the most extreme elements and where they are.

Of equal elements the first counts, so that the answer does not depend on how the values were split (on
devices other than the CPU, where looking would mean waiting, torch decides between equals). NaN is never
among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

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

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "k": self.k, "by": self.by}

    def _first(self, flat: Tensor) -> Tensor:
        """Where the first k elements are, in order."""
        key = self._key(flat)
        if flat.device.type != "cpu":
            if key.is_floating_point():
                key = torch.where(key.isnan(), -torch.inf, key)
            return torch.topk(key, min(self.k, key.numel())).indices
        k = min(self.k, key.numel())
        if k == 0:
            return torch.zeros(0, dtype=torch.int64)
        # One more than asked for tells whether the last place is contested; NaN would be in front.
        top, candidates = torch.topk(key, min(k + 1, key.numel()))
        if top.isnan().any():
            numbers = (~key.isnan()).nonzero().reshape(-1)
            return numbers[self._first(flat[numbers])]
        if len(top) > k and top[k] == top[k - 1]:
            ahead = (key > top[k]).nonzero().reshape(-1)
            level = (key == top[k]).nonzero().reshape(-1)
            candidates = torch.cat([ahead, level[: k - len(ahead)]])
        candidates = candidates[:k].sort().values
        return candidates[torch.sort(key[candidates], descending=True, stable=True).indices]

    def _key(self, flat: Tensor) -> Tensor:
        """Numbers that are the larger the earlier an element comes."""
        if not flat.is_floating_point():
            # Wide enough that no magnitude and no negation overflows. (Of int64 beyond 2**53, float64 takes
            # neighbours for equal.)
            flat = flat.double() if flat.dtype is torch.int64 else flat.long()
        return {"abs": flat.abs, "largest": flat.clone, "smallest": flat.neg}[self.by]()
