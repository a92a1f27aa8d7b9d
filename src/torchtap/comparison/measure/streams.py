"""Values that come piece by piece and are never whole in memory, and their distance.

A piece is read, verified and measured while it is still in the cache, and the next is read meanwhile: large recordings
are compared at about the speed at which their bytes can be read, in a few megabytes, however large a single value is.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import final

import numpy as np

from torchtap.comparison.measure.measures import Measures, RunningMeasures, threads
from torchtap.comparison.measure.values import Array
from torchtap.errors import RunCorruptError
from torchtap.store.format.dtypes import BY_NAME

__all__ = ["PIECE_BYTES", "ValueStream", "can_stream", "measure_streams"]

PIECE_BYTES = 1 << 20  # a few of them stay in a core's caches


def can_stream(dtype: str) -> bool:
    """Whether bytes of a dtype can be measured as they lie in a file."""
    stored = BY_NAME.get(dtype)
    return dtype == "bfloat16" or (
        stored is not None and stored.numpy is not None and not dtype.startswith("complex")
    )


@final
@dataclass(frozen=True, slots=True)
class ValueStream:
    """A value's shape and dtype, and its bytes in order. A piece is overwritten by the next but one."""

    shape: tuple[int, ...]
    dtype: str
    pieces: Iterator[memoryview]

    def arrays(self) -> Iterator[Array]:
        """The elements in order, flat; those of bfloat16 as their bits."""
        kind = np.dtype("<u2" if self.dtype == "bfloat16" else (BY_NAME[self.dtype].numpy or "u1"))
        for piece in self.pieces:
            yield np.frombuffer(piece, kind.newbyteorder("<"))


def measure_streams(reference: ValueStream, target: ValueStream) -> Measures:
    """The same as `measure`, of two streams of one shape."""
    if threads() < 2:
        return _measure(reference, target, reference.arrays(), target.arrays())
    with ThreadPoolExecutor(2) as pool:
        return _measure(reference, target, _ahead(reference.arrays(), pool), _ahead(target.arrays(), pool))


def _ahead(pieces: Iterator[Array], pool: ThreadPoolExecutor) -> Iterator[Array]:
    """The same pieces; while one is looked at, another thread reads the next."""
    coming = pool.submit(next, pieces, None)
    while (piece := coming.result()) is not None:
        coming = pool.submit(next, pieces, None)
        yield piece


def _measure(
    reference: ValueStream, target: ValueStream, left: Iterator[Array], right: Iterator[Array]
) -> Measures:
    tally = RunningMeasures(reference.shape, reference.dtype, target.dtype)
    empty = np.empty(0)
    r, t, offset = empty, empty, 0
    total = prod(reference.shape)
    while offset < total:
        r = r if r.size else next(left, empty)
        t = t if t.size else next(right, empty)
        size = min(r.size, t.size)
        if size == 0:
            raise RunCorruptError(f"a stored tensor ended after {offset} of its {total} elements")
        tally.add(offset, r[:size], t[:size])
        r, t, offset = r[size:], t[size:], offset + size
    for rest in (left, right):  # reaching the end of a stream is what verifies it
        if next(rest, None) is not None:
            raise RunCorruptError(f"a stored tensor goes on after its {total} elements")
    return tally.result()
