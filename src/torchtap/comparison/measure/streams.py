"""Tensors that come piece by piece and are never whole in memory, and their distance.

A piece is read, verified and measured while it is still in the cache: large recordings are compared at about the speed
at which their bytes can be read, in a few megabytes, however large a single tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import final

import numpy as np
import torch
from torch import Tensor

from torchtap.comparison.measure.measures import Measures, Tally
from torchtap.errors import RunCorruptError

__all__ = ["PIECE_BYTES", "Stream", "measure_streams"]

PIECE_BYTES = 1 << 19  # two of them and what is made of them stay in the second-level cache


@final
@dataclass(frozen=True, slots=True)
class Stream:
    """A tensor's shape and dtype, and its bytes in order. A piece is overwritten by the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Iterator[memoryview]

    def tensors(self) -> Iterator[Tensor]:
        """The elements in order, flat."""
        for piece in self.pieces:
            yield torch.from_numpy(np.frombuffer(piece, np.uint8)).view(self.dtype)


def measure_streams(reference: Stream, target: Stream) -> Measures:
    """The same as `measure`, of two streams of one shape."""
    tally = Tally(torch.Size(reference.shape), reference.dtype, target.dtype)
    left, right = reference.tensors(), target.tensors()
    empty = torch.empty(0)
    r, t, offset = empty, empty, 0
    total = prod(reference.shape)
    while offset < total:
        r = r if r.numel() else next(left, empty)
        t = t if t.numel() else next(right, empty)
        size = min(r.numel(), t.numel())
        if size == 0:
            raise RunCorruptError(f"a stored tensor ended after {offset} of its {total} elements")
        tally.add(offset, r[:size], t[:size])
        r, t, offset = r[size:], t[size:], offset + size
    for rest in (left, right):  # reaching the end of a stream is what verifies it
        if next(rest, None) is not None:
            raise RunCorruptError(f"a stored tensor goes on after its {total} elements")
    return tally.result()
