"""Reductions over features, heads and samples: ``Units``, ``Entropy``, ``Gram`` and ``SampleSpread``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce.densify import densify, densify_real
from torchtap.reduce.reduction import Reduction, Result, outside_transforms

__all__ = ["Entropy", "Gram", "SampleSpread", "Units"]

_GLANCE = 16  # values of a unit that are read first


@final
@dataclass(frozen=True, slots=True)
class Units(Reduction[Tensor]):
    """The number of units, of dead ones, and their share; ``fired`` says which units fired.

    A unit is one index of the features. It is dead if all its values are zero. The share of zeros cannot tell: half of
    the units dead, and every unit zero half of the time, look the same there.

    dim: the dimension of the units; None for dimension 1 of values with four dimensions and more, else the last.
    which: keep ``fired`` beside the numbers.
    """

    name: ClassVar[str] = "units"

    dim: int | None = None
    which: bool = True

    @outside_transforms
    def update(self, state: Tensor | None, value: Tensor) -> Tensor:
        plain = densify_real(value)
        if not plain.dim():
            raise ReductionError("Units needs a value with at least one dimension; got a single number")
        dim = (1 if plain.dim() >= 4 else -1) if self.dim is None else self.dim
        try:
            fired = _fired(plain.movedim(dim, 0).flatten(1) if plain.dim() > 1 else plain.unsqueeze(1))
        except IndexError as error:
            raise ReductionError(
                f"Units(dim={dim}) does not fit a value of shape {tuple(value.shape)}"
            ) from error
        return fired if state is None else self.merge(state, fired)

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        if left.shape != right.shape:
            raise ReductionError(f"Units cannot join values of {len(left)} and {len(right)} units")
        return left | right.to(left.device)

    def result(self, state: Tensor) -> Result:
        dead = (~state).sum().double()
        numbers: Result = {"units": float(len(state)), "dead": dead, "dead_share": dead / max(1, len(state))}
        return {**numbers, "fired": state} if self.which else numbers

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "dim": self.dim, "which": self.which}


def _fired(rows: Tensor) -> Tensor:
    """Return which rows have a nonzero value.

    On the CPU a few values decide for nearly every row, and only the others are read to their end. Elsewhere that look
    would wait for the device.
    """
    if rows.device.type != "cpu" or rows.shape[1] <= 4 * _GLANCE:
        return rows.ne(0).any(1)
    fired = rows[:, :_GLANCE].ne(0).any(1)
    silent = (~fired).nonzero()[:, 0]
    if len(silent):
        fired[silent] = rows[silent].ne(0).any(1)
    return fired


@final
@dataclass(frozen=True, slots=True)
class Entropy(Reduction[tuple[Tensor, int]]):
    """Mean entropy in nats of the distributions in the last dimension, for each index of dimension 1.

    Made for attention maps, ``(batch, heads, ..., outcomes)``: a few numbers however long the sequence is.
    """

    name: ClassVar[str] = "entropy"

    def update(self, state: tuple[Tensor, int] | None, value: Tensor) -> tuple[Tensor, int]:
        return self.update_pieces(state, [value])

    def update_pieces(self, state: tuple[Tensor, int] | None, pieces: Iterable[Tensor]) -> tuple[Tensor, int]:
        measured = [_entropy_by_head(piece) for piece in pieces]
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


def _entropy_by_head(value: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the entropies of each head, and the number of distributions of a head."""
    if value.dim() < 2:
        raise ReductionError(
            f"Entropy needs (batch, heads, ..., outcomes); got the shape {tuple(value.shape)}"
        )
    each = torch.special.entr(densify(value).float()).sum(-1)
    if each.dim() == 1:  # (batch, outcomes): one head
        each = each.unsqueeze(1)
    others = [dim for dim in range(each.dim()) if dim != 1]
    return each.double().sum(others), each.numel() // max(1, each.shape[1])


@final
@dataclass(frozen=True)
class Gram(Reduction[tuple[Tensor, int]]):
    """``gram``: XᵀX (features × features) with every dimension but the last as rows, and their number ``rows``.

    Covariance, whitening, CKA and probes start from it. It adds up over batches and ranks.

    dtype: ``"float64"`` or, faster and half as large, ``"float32"``.
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
        plain = densify_real(value)
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


@final
@dataclass(frozen=True, slots=True)
class SampleSpread(Reduction[Tensor]):
    """``between``: the part of the mean square that differs between samples, from 0 to 1; NaN for fewer than four.

    It is zero for a model whose output does not depend on its input. The samples are the indices of dimension 0.

    features: the largest number of features to read, evenly spread. Values that are not finite count as zero.
    """

    name: ClassVar[str] = "sample_spread"

    features: int = 1024

    @outside_transforms
    def update(self, state: Tensor | None, value: Tensor) -> Tensor:
        plain = densify_real(value)
        if not plain.dim():  # a loss among a model's outputs: one sample of one feature
            plain = plain.reshape(1, 1)
        flat = plain.reshape(len(plain), -1) if plain.numel() else plain.new_zeros((0, 1))
        stride = max(1, -(-flat.shape[1] // self.features))
        some = torch.nan_to_num(flat[:, ::stride].double(), 0.0, 0.0, 0.0)
        count = torch.full_like(some.sum(0), len(some))
        seen = torch.stack([count, some.sum(0), some.square().sum(0)])
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
