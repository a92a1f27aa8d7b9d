"""``Entropy``: how spread out distributions are, head by head; made for attention maps.

A value is ``(batch, heads, ..., outcomes)`` and each last dimension is a distribution. What is kept is the mean
entropy in nats of each head, over batch and positions, so it costs a few numbers however long the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.readable import readable

__all__ = ["Entropy"]


@final
@dataclass(frozen=True, slots=True)
class Entropy(Reduction[tuple[Tensor, int]]):
    """Mean entropy of the distributions in the last dimension, for each index of dimension 1."""

    name: ClassVar[str] = "entropy"

    def update(self, state: tuple[Tensor, int] | None, value: Tensor) -> tuple[Tensor, int]:
        return self.update_pieces(state, [value])

    def update_pieces(self, state: tuple[Tensor, int] | None, pieces: Iterable[Tensor]) -> tuple[Tensor, int]:
        measured = [_by_head(piece) for piece in pieces]
        found = torch.cat([total for total, _ in measured]), measured[0][1]
        return found if state is None else self.merge(state, found)

    def merge(self, left: tuple[Tensor, int], right: tuple[Tensor, int]) -> tuple[Tensor, int]:
        if left[0].shape != right[0].shape:
            raise ReductionError(f"Entropy cannot join values of {len(left[0])} and {len(right[0])} heads")
        return left[0] + right[0].to(left[0].device), left[1] + right[1]

    def result(self, state: tuple[Tensor, int]) -> Result:
        mean = state[0] / state[1]
        return {"entropy": mean.mean(), **{f"head_{head}": value for head, value in enumerate(mean)}}

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name}


def _by_head(value: Tensor) -> tuple[Tensor, int]:
    """The sum of the entropies of each head, and how many distributions a head has."""
    if value.dim() < 2:
        raise ReductionError(
            f"Entropy needs (batch, heads, ..., outcomes); got the shape {tuple(value.shape)}"
        )
    each = torch.special.entr(readable(value).float()).sum(-1)
    if each.dim() == 1:  # (batch, outcomes): one head
        each = each.unsqueeze(1)
    others = [dim for dim in range(each.dim()) if dim != 1]
    return each.double().sum(others), each.numel() // max(1, each.shape[1])
