"""``Histogram``: how the values are distributed, in bins that never depend on the data, so counts add up.

Over a given range the bins are equal and agree with ``numpy.histogram``. Without one they are those of
`octaves`, which hold numbers of any size and sign and are fine where the numbers are small. Values outside
of all bins, NaN and infinities are counted apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import kernel
from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.octaves import OctaveGrid, tally
from torchtap.reduce.readable import readable_real
from torchtap.reduce.transforms import outside_transforms

__all__ = ["Histogram"]

_CHUNK = 1 << 20


@final
@dataclass(frozen=True)
class Histogram(Reduction[Tensor]):
    """Counts in bins.

    range, bins: this many equal bins (64) over this range; the last one includes its end.
    octaves, per_octave: where there is no range, bins from ``2 ** octaves[0]`` to ``2 ** octaves[1]`` on both
        sides of zero, ``per_octave`` of them to a power of two, and one bin for what is nearer to zero.

    The result has ``counts``, ``edges`` (one more), ``underflow``, ``overflow``, ``nans`` and ``infs``. The
    state is one tensor of counts: below, in each bin, above, NaN, infinite.
    """

    name: ClassVar[str] = "histogram"
    elementwise: ClassVar[bool] = True

    bins: int | None = None
    range: tuple[float, float] | None = None
    octaves: tuple[int, int] = (-32, 16)
    per_octave: int = 2
    _grid: OctaveGrid | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.range is not None:
            bins = 64 if self.bins is None else self.bins
            object.__setattr__(self, "bins", bins)
            object.__setattr__(self, "range", _checked_range(bins, self.range))
        elif self.bins is not None:
            raise ReductionError(
                f"Histogram(bins={self.bins}) has equal bins, but of what range? Give range=(low, high), or "
                "leave bins out for bins that need no range (per_octave=... makes those finer)"
            )
        first, last = map(int, self.octaves)
        if not -126 <= first < last <= 127 or self.per_octave not in (1, 2, 4, 8, 16, 32, 64):
            raise ReductionError(
                f"Histogram(octaves={self.octaves}, per_octave={self.per_octave}) has no bins; give two "
                "exponents of two between -126 and 127, the smaller first, and 1, 2, 4 ... 64 bins per octave"
            )
        object.__setattr__(self, "octaves", (first, last))
        grid = None if self.range is not None else OctaveGrid(first, last, self.per_octave)
        object.__setattr__(self, "_grid", grid)

    @property
    def edges(self) -> Tensor:
        """The ends of the bins, ascending, float64."""
        if self._grid is not None:
            return self._grid.edges
        assert self.range is not None
        assert self.bins is not None
        return torch.linspace(*self.range, self.bins + 1, dtype=torch.float64)

    @outside_transforms
    def update(self, state: Tensor | None, value: Tensor) -> Tensor:
        plain = readable_real(value)
        counts = self._grid.count(plain) if self._grid is not None else self._count_in_range(plain)
        return counts if state is None else state.add_(counts.to(state.device))

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right.to(left.device)

    def result(self, state: Tensor) -> Result:
        counts = state.to("cpu")
        under, over, nans, infs = (float(counts[place]) for place in (0, -3, -2, -1))
        outside = {"underflow": under, "overflow": over, "nans": nans, "infs": infs}
        return {"counts": counts[1:-3].clone(), "edges": self.edges.clone(), **outside}

    def spec(self) -> dict[str, object]:
        if self.range is not None:
            return {"reduction": self.name, "bins": self.bins, "range": list(self.range)}
        return {"reduction": self.name, "octaves": list(self.octaves), "per_octave": self.per_octave}

    def _count_in_range(self, plain: Tensor) -> Tensor:
        assert self.range is not None
        assert self.bins is not None
        (low, high), bins = self.range, self.bins
        edges = self.edges.to(plain.device)
        counts = torch.zeros(bins + 4, dtype=torch.int64, device=plain.device)
        if kernel.count(plain, counts, edges=edges):
            return counts
        for chunk in torch.split(plain.reshape(-1), _CHUNK):
            x = chunk.double()
            nan = x.isnan()
            near = ((x - low) * (bins / (high - low))).nan_to_num_(0.0, bins, 0.0).clamp_(0, bins - 1).long()
            # Rounding may be off by one beside an edge; the edges decide.
            near -= ((x < edges[near]) & (near > 0)).long()
            near += ((x >= edges[near + 1]) & (near < bins - 1)).long()
            place = torch.where(x < low, 0, torch.where(x > high, bins + 1, near + 1))
            place = torch.where(nan, bins + 2, torch.where(x.isinf(), bins + 3, place))
            counts += tally(place, bins + 4)
        return counts


def _checked_range(bins: int, given: tuple[float, float]) -> tuple[float, float]:
    low, high = map(float, given)
    if not (low < high and math.isfinite(high - low)) or bins < 1:
        raise ReductionError(
            f"Histogram(bins={bins}, range={given}) has no bins; give at least one bin "
            "and a range with its smaller end first, such as bins=64, range=(-1, 1)"
        )
    return low, high
