"""``Fingerprint``: whether two values are the same, element by element, told by two numbers.

Statistics of a value stay the same when its elements change places. These do not:

- ``fingerprint``: the bits of each element times a key of its place, summed. Whole numbers that wrap around, so the sum
  is the same on every machine, in every order; values that differ in a bit or in a place have different ones.
- ``projection``: the elements times weights of their places, summed. It is linear: that of a sum of values is the sum
  of theirs, up to rounding. So an average over ranks, or a weight and its update, can be checked without the values.

Both read the value once, a stretch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.readable import COMPUTABLE, readable
from torchtap.reduce.transforms import outside_transforms

__all__ = ["Fingerprint"]

_STRETCH = 1 << 16  # elements whose keys are kept; the stretches' sums are mixed with their numbers
_MIX = -7046029254386353131  # an odd number, 2**64 over the golden ratio
_ORDER = 6364136223846793005
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DROPPED = 12  # bits: what stays is a whole number that a float64 holds exactly


class _Prints(NamedTuple):
    values: int
    bits: Tensor  # int64
    projection: Tensor  # float64


@final
@dataclass(frozen=True, slots=True)
class Fingerprint(Reduction[_Prints]):
    """A number that differs wherever a bit or an element's place does, and a linear one."""

    name: ClassVar[str] = "fingerprint"

    @outside_transforms
    def update(self, state: _Prints | None, value: Tensor) -> _Prints:
        plain = readable(value)
        flat = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
        bits = torch.zeros((), dtype=torch.int64, device=flat.device)
        projection = torch.zeros((), dtype=torch.float64, device=flat.device)
        keys, weights = _keys(str(flat.device))
        for number, stretch in enumerate(flat.split(_STRETCH)):
            count = len(stretch)
            own = _dot(stretch.view(_WHOLE[stretch.element_size()]).long(), keys[:count])
            bits = bits * _MIX + own if number else own
            if stretch.dtype not in COMPUTABLE:
                stretch = stretch.float()
            part = _dot(stretch.double(), weights[:count])
            # Each stretch counts by a factor of its own, or stretches that change places would not be seen.
            projection = projection + part * (1 + number * 0.6180339887 % 1) if number else part
        # The shape is a part of the value: the same elements in rows of another length are another matrix.
        bits = bits * _MIX + _of_shape(tuple(plain.shape))
        seen = _Prints(1, bits, projection)
        return seen if state is None else self.merge(state, seen)

    def merge(self, left: _Prints, right: _Prints) -> _Prints:
        factor = _signed(pow(_ORDER, right.values, 1 << 64))  # so that the order of values counts
        bits = left.bits.to(right.bits.device) * factor + right.bits
        total = left.projection.to(right.projection.device) + right.projection
        return _Prints(left.values + right.values, bits, total)

    def result(self, state: _Prints) -> Result:
        return {"fingerprint": (state.bits >> _DROPPED).double(), "projection": state.projection}

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name}


def _dot(left: Tensor, right: Tensor) -> Tensor:
    if left.device.type == "cpu":
        return torch.dot(left, right)
    return (left * right).sum()  # there is no product of whole numbers elsewhere


def _of_shape(shape: tuple[int, ...]) -> int:
    mixed = len(shape)
    for size in shape:
        mixed = (mixed * _ORDER + size) % (1 << 64)
    return _signed(mixed)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


@lru_cache(maxsize=8)
def _keys(device: str) -> tuple[Tensor, Tensor]:
    """Odd keys and weights of the places in a stretch; the same in every process and on every machine."""
    with torch.inference_mode(False), torch.no_grad():
        source = torch.Generator().manual_seed(20)
        halves = torch.randint(0, 1 << 32, (2, _STRETCH), generator=source, dtype=torch.int64)
        keys = (halves[0] << 32 ^ halves[1]) | 1
        weights = (halves[0].double() / (1 << 31)) - 1
        return keys.to(device), weights.to(device)
