"""``Units``: how many units of a layer never fire, whatever share of its values is zero.

A unit is one index of the features: of the last dimension, or of dimension 1 where a value is ``(batch, channels,
height, width)`` and its like. A unit is dead when all its values in the fold are zero. The share of zeros cannot tell:
half of the units dead, and every unit zero half of the time, look the same there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.readable import readable_real
from torchtap.reduce.transforms import outside_transforms

__all__ = ["Units"]


_GLANCE = 16  # values of a unit that are looked at first


@final
@dataclass(frozen=True, slots=True)
class Units(Reduction[Tensor]):
    """The number of units, of dead ones, and their share; ``fired`` says which units fired.

    dim: where the units are; None for dimension 1 of values with four dimensions and more, else the last.
    which: whether to keep which units fired, beside the numbers.
    """

    name: ClassVar[str] = "units"

    dim: int | None = None
    which: bool = True

    @outside_transforms
    def update(self, state: Tensor | None, value: Tensor) -> Tensor:
        plain = readable_real(value)
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
        return {
            "units": float(len(state)),
            "dead": dead,
            "dead_share": dead / max(1, len(state)),
            **({"fired": state} if self.which else {}),
        }

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "dim": self.dim, "which": self.which}


def _fired(rows: Tensor) -> Tensor:
    """Which rows have a value that is not zero.

    A few values tell of nearly every row that it has; the others alone are read to their end. On a device that would
    be to wait for it.
    """
    if rows.device.type != "cpu" or rows.shape[1] <= 4 * _GLANCE:
        return rows.ne(0).any(1)
    first = rows[:, 0].ne(0)
    if bool(first.all()):
        return first
    fired = rows[:, :_GLANCE].ne(0).any(1)
    silent = (~fired).nonzero()[:, 0]
    if len(silent):
        fired[silent] = rows[silent].ne(0).any(1)
    return fired
