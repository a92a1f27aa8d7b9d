"""``Histogram`` and ``Quantiles``: counts in bins that never depend on the data, so that counts add up.

Without a range the bins are logarithmic (`LogBins`): powers of two, each divided evenly, mirrored at zero. The bin of a
number is read off the bits of its floating-point form: exact, the same on every device, and faster than a search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import kernel
from torchtap.reduce.densify import densify_real
from torchtap.reduce.reduction import Reduction, Result, outside_transforms
from torchtap.reduce.stats import measure

__all__ = ["Histogram", "LogBins", "Quantiles"]

_CHUNK = 1 << 20  # bounds the temporary memory: a few int64 arrays of this many elements
_FINEST = 10  # bits of an octave in `Quantiles`; its sketch has 2 MiB


@final
@dataclass(frozen=True)
class LogBins:
    """Bins from ``2 ** low`` to ``2 ** high`` on both sides of zero; ``per_octave`` is a power of two.

    Each bin is closed at its end nearer to zero. One bin between the sides holds smaller numbers.
    """

    low: int
    high: int
    per_octave: int

    @property
    def side(self) -> int:
        """Return the number of bins on each side of zero."""
        return (self.high - self.low) * self.per_octave

    @property
    def size(self) -> int:
        """Return the number of counts: under, bins with the middle, over, NaN, infinite."""
        return 2 * self.side + 5

    @cached_property
    def edges(self) -> Tensor:
        """Return the edges of all bins, ascending, float64; one more than there are bins."""
        steps = torch.arange(self.side, dtype=torch.float64)
        octave = (steps / self.per_octave).floor()
        inside = 1 + (steps - octave * self.per_octave) / self.per_octave
        end = torch.tensor([2.0**self.high], dtype=torch.float64)
        positive = torch.cat([inside * torch.exp2(octave + self.low), end])
        return torch.cat([-positive.flip(0), positive])

    def places(self, values: Tensor) -> Tensor:
        """Return the index of the count to which each real number belongs."""
        wide = values.dtype in (torch.float64, torch.int32, torch.int64)  # float32 would round these
        bits = values.to(torch.float64).view(torch.int64) if wide else values.float().view(torch.int32)
        mantissa, bias = (52, 1023) if wide else (23, 127)
        infinite = (2 * bias + 1) << mantissa
        magnitude = bits & ((1 << (63 if wide else 31)) - 1)
        first = (self.low + bias) * self.per_octave
        step = magnitude >> (mantissa - (self.per_octave.bit_length() - 1))
        step = (step - (first - 1)).clamp_(0, self.side + 1)
        # The sign bit moves a step to the other side; step 0 is the middle for both signs.
        place = torch.where(bits < 0, -step, step).add_(self.side + 1)
        place = torch.where(magnitude >= infinite, self.size - 1, place)
        return torch.where(magnitude > infinite, self.size - 2, place)

    def count(self, values: Tensor) -> Tensor:
        """Return the number of dense values at each place: int64, on the values' device."""
        counts = torch.zeros(self.size, dtype=torch.int64, device=values.device)
        if kernel.count(values, counts, log_bins=(self.low, self.high, self.per_octave.bit_length() - 1)):
            return counts
        for chunk in torch.split(values.reshape(-1), _CHUNK):
            counts += _tally(self.places(chunk), self.size)
        return counts


def _tally(places: Tensor, size: int) -> Tensor:
    """Return how often each number below ``size`` occurs, without waiting for a device."""
    if places.device.type == "cpu":
        return torch.bincount(places, minlength=size)
    places = places.to(torch.int64)  # bincount would wait for the largest
    counts = torch.zeros(size, dtype=torch.int64, device=places.device)
    return counts.scatter_add_(0, places, torch.ones_like(places))


@final
@dataclass(frozen=True)
class Histogram(Reduction[Tensor]):
    """Counts in bins.

    range, bins: this many equal bins (64) over this range, as in ``numpy.histogram``; the last includes its end.
    octaves, per_octave: without a range, bins from ``2 ** octaves[0]`` to ``2 ** octaves[1]`` on both sides of zero,
        ``per_octave`` of them in each power of two, and one bin for smaller magnitudes.

    The result has ``counts``, ``edges`` (one more), ``underflow``, ``overflow``, ``nans`` and ``infs``. The
    state is one tensor of counts: below, in each bin, above, NaN, infinite.
    """

    name: ClassVar[str] = "histogram"
    elementwise: ClassVar[bool] = True

    bins: int | None = None
    range: tuple[float, float] | None = None
    octaves: tuple[int, int] = (-32, 16)
    per_octave: int = 2
    _grid: LogBins | None = field(init=False, repr=False, compare=False)

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
        grid = None if self.range is not None else LogBins(first, last, self.per_octave)
        object.__setattr__(self, "_grid", grid)

    @property
    def edges(self) -> Tensor:
        """Return the edges of the bins, ascending, float64."""
        if self._grid is not None:
            return self._grid.edges
        assert self.range is not None
        assert self.bins is not None
        return torch.linspace(*self.range, self.bins + 1, dtype=torch.float64)

    @outside_transforms
    def update(self, state: Tensor | None, value: Tensor) -> Tensor:
        plain = densify_real(value)
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
            near = ((x - low) * (bins / (high - low))).nan_to_num_(0.0, bins, 0.0).clamp_(0, bins - 1).long()
            # Rounding may be off by one beside an edge; the edges decide.
            near -= ((x < edges[near]) & (near > 0)).long()
            near += ((x >= edges[near + 1]) & (near < bins - 1)).long()
            place = torch.where(x < low, 0, torch.where(x > high, bins + 1, near + 1))
            place = torch.where(x.isnan(), bins + 2, torch.where(x.isinf(), bins + 3, place))
            counts += _tally(place, bins + 4)
        return counts


def _checked_range(bins: int, given: tuple[float, float]) -> tuple[float, float]:
    low, high = map(float, given)
    if not (low < high and math.isfinite(high - low)) or bins < 1:
        raise ReductionError(
            f"Histogram(bins={bins}, range={given}) has no bins; give at least one bin "
            "and a range with its smaller end first, such as bins=64, range=(-1, 1)"
        )
    return low, high


@final
@dataclass(frozen=True)
class Quantiles(Reduction[tuple[Tensor, Tensor]]):
    """The values below which given shares of all values lie.

    at: the shares, from 0 to 1. The result names them in percent: ``p50`` is the median.
    accuracy: the largest relative error; 0.01 takes 128 KiB for each site, 0.02 half of it.

    The value of a share q of n values is the one at rank floor(q * (n - 1)) of the sorted values; NaN without values.
    The accuracy holds for magnitudes from 2**-64 to 2**64. Smaller ones give 0, and the ends, 0 and 1, are exact. NaN
    and infinities are left out.

    The state is counts in `LogBins` (the idea of DDSketch), and the smallest and largest value. Sketches that adapt to
    the data (KLL, t-digest) are smaller, but their answers depend on how the stream was divided. These counts only add
    up, so every division over micro-batches and ranks gives the same bits.
    """

    name: ClassVar[str] = "quantiles"
    elementwise: ClassVar[bool] = True

    at: tuple[float, ...] = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
    accuracy: float = 0.01
    _grid: LogBins = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at = tuple(float(share) for share in self.at)
        if not at or not all(0 <= share <= 1 for share in at):
            raise ReductionError(
                f"Quantiles(at={self.at}): give shares between 0 and 1, such as at=(0.5, 0.99)"
            )
        if not 2.0 ** -(_FINEST + 1) <= self.accuracy < 0.5:
            raise ReductionError(
                f"Quantiles(accuracy={self.accuracy}) is out of reach: it can be from "
                f"{2.0 ** -(_FINEST + 1):.1g} to 0.5"
            )
        object.__setattr__(self, "at", at)
        # The middle of a bin is at most half its width away, and a width is at most 1 / per_octave of its place.
        bits = math.ceil(-math.log2(self.accuracy)) - 1
        object.__setattr__(self, "_grid", LogBins(-64, 64, 1 << bits))

    @outside_transforms
    def update(self, state: tuple[Tensor, Tensor] | None, value: Tensor) -> tuple[Tensor, Tensor]:
        plain = densify_real(value)
        low, high = measure(plain)[6:8]
        seen = (self._grid.count(plain), torch.stack([low, -high]))
        return seen if state is None else self.merge(state, seen)

    def merge(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        counts, ends = (part.to(left[0].device) for part in right)
        return left[0] + counts, torch.minimum(left[1], ends)

    def result(self, state: tuple[Tensor, Tensor]) -> Result:
        # Computed on the device of the counts: the host would wait for each number that it reads.
        counts, (low, negated_high) = state[0][:-2], state[1]
        high = -negated_high
        upto = counts.cumsum(0)
        total = upto[-1]
        shares = torch.tensor(self.at, dtype=low.dtype, device=low.device)
        ranks = (shares * (total - 1)).floor().to(torch.int64)
        middles = self._middles.to(low.device, low.dtype)
        places = torch.searchsorted(upto, ranks, right=True).clamp(max=len(middles) - 1)
        found = torch.minimum(torch.maximum(middles[places], low), high)
        found = torch.where(ranks == 0, low, found)
        found = torch.where(ranks == total - 1, high, found)
        found = torch.where(total == 0, torch.nan, found)
        names = (f"p{round(100 * share, 10):g}" for share in self.at)
        return dict(zip(names, found.unbind(), strict=True))

    def to_merge(self, state: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the sketch as integers: the ends and the fineness, then nonempty bins and their counts."""
        counts, ends = state[0].to("cpu"), state[1].to("cpu", torch.float64)
        places = counts.nonzero().reshape(-1)
        head = torch.stack([ends.view(torch.int64), torch.tensor([self._grid.per_octave, 0])], 1)
        return {"sketch": torch.cat([head, torch.stack([places, counts[places]])], 1)}

    @cached_property
    def _middles(self) -> Tensor:
        """Return the middle of each bin; beyond the grid, infinity, which the ends of the data limit."""
        edges = self._grid.edges
        beyond = edges.new_tensor([math.inf])
        return torch.cat([-beyond, (edges[:-1] + edges[1:]) / 2, beyond])

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "at": list(self.at), "accuracy": self.accuracy}
