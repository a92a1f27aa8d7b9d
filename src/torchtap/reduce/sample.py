"""``Sample``: some of the elements, at positions that stay the same, so that single elements can be followed.

Positions depend on the number of elements and the seed alone: every step, rank and run that sees a value of
one size looks at the same places, on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.readable import readable
from torchtap.reduce.transforms import outside_transforms

__all__ = ["Sample"]


@final
@dataclass(frozen=True)
class Sample(Reduction[tuple[list[Tensor], list[Tensor]]]):
    """``n`` elements of each value (all of them if there are fewer), drawn without repetition.

    The result has ``values`` and ``positions``, the flat index of each in its own value; several values
    follow one after the other.
    """

    name: ClassVar[str] = "sample"

    n: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or self.seed < 0:
            raise ReductionError(
                f"Sample(n={self.n}, seed={self.seed}): n is the number of elements to keep, at least 1, "
                "and the seed is not negative"
            )

    @outside_transforms
    def update(
        self, state: tuple[list[Tensor], list[Tensor]] | None, value: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        plain = readable(value)
        positions = _positions(plain.numel(), self.n, self.seed)
        # Indexed by coordinates: flattening would copy a value that does not lie in one piece.
        at = torch.unravel_index(positions, plain.shape) if plain.dim() and plain.numel() else ...
        taken = _as_bits(plain)[at].reshape(-1).clone().view(plain.dtype)
        if state is None:
            return [taken], [positions]
        state[0].append(taken)
        state[1].append(positions)
        return state

    def merge(
        self, left: tuple[list[Tensor], list[Tensor]], right: tuple[list[Tensor], list[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        return left[0] + right[0], left[1] + right[1]

    def result(self, state: tuple[list[Tensor], list[Tensor]]) -> Result:
        return {
            "values": _joined([taken.to("cpu") for taken in state[0]]),
            "positions": torch.cat(state[1]),
        }

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "n": self.n, "seed": self.seed}


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_bits(value: Tensor) -> Tensor:
    """The same memory as whole numbers: not every torch can index or join float8 and unsigned numbers."""
    return value.view(_BITS.get(value.element_size(), value.dtype))


def _joined(values: list[Tensor]) -> Tensor:
    """All values one after the other; of several dtypes, in the one that holds them all."""
    if len({value.dtype for value in values}) > 1:
        return torch.cat(values)
    return torch.cat([_as_bits(value) for value in values]).view(values[0].dtype)


@lru_cache(maxsize=1024)
def _positions(count: int, n: int, seed: int) -> Tensor:
    if count <= n:
        return torch.arange(count)
    draw = np.random.Generator(np.random.PCG64([seed, count]))
    return torch.from_numpy(np.sort(draw.choice(count, n, replace=False, shuffle=False)))
