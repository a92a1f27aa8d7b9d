"""A grid of bins for numbers of any size: powers of two, each cut evenly, mirrored at zero.

Which bin a number is in is read off the bits of its floating-point form: exact, the same on every device,
and far faster than a search. On each side of zero, ``per_octave`` bins cut each power of two
from ``2 ** low`` to ``2 ** high``; each is closed at its end nearer to zero. Between the sides lies one bin
for what is smaller, beyond them what is larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from torchtap.reduce import kernel

__all__ = ["OctaveGrid", "tally"]

# Bounds the temporary memory: a few int64 arrays of this many elements.
_CHUNK = 1 << 21


@final
@dataclass(frozen=True)
class OctaveGrid:
    """Bins from ``2 ** low`` to ``2 ** high`` on both sides of zero; ``per_octave`` is a power of two."""

    low: int
    high: int
    per_octave: int

    @property
    def side(self) -> int:
        """How many bins there are on each side of zero."""
        return (self.high - self.low) * self.per_octave

    @property
    def size(self) -> int:
        """How many counts there are: under, bins with the middle, over, NaN, infinite."""
        return 2 * self.side + 5

    @cached_property
    def edges(self) -> Tensor:
        """The edges of all bins, ascending, float64; one more than there are bins."""
        steps = torch.arange(self.side, dtype=torch.float64)
        octave = (steps / self.per_octave).floor()
        inside = 1 + (steps - octave * self.per_octave) / self.per_octave
        end = torch.tensor([2.0**self.high], dtype=torch.float64)
        positive = torch.cat([inside * torch.exp2(octave + self.low), end])
        return torch.cat([-positive.flip(0), positive])

    def places(self, values: Tensor) -> Tensor:
        """For each of some real numbers, which of the ``size`` counts it belongs to."""
        wide = values.dtype in (torch.float64, torch.int32, torch.int64)  # what float32 would round
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
        """How many of some `readable` values belong to each place: int64, on the values' device."""
        counts = torch.zeros(self.size, dtype=torch.int64, device=values.device)
        if kernel.count(values, counts, octaves=(self.low, self.high, self.per_octave.bit_length() - 1)):
            return counts
        for chunk in torch.split(values.reshape(-1), _CHUNK):
            counts += tally(self.places(chunk), self.size)
        return counts


def tally(places: Tensor, size: int) -> Tensor:
    """How often each number below ``size`` occurs, without waiting for a device."""
    if places.device.type == "cpu":
        return torch.bincount(places, minlength=size)
    # bincount would wait, to look at the largest.
    places = places.to(torch.int64)
    counts = torch.zeros(size, dtype=torch.int64, device=places.device)
    return counts.scatter_add_(0, places, torch.ones_like(places))
