"""A value as it is compared: a numpy array of its exact numbers, and the name of the dtype that it had.

Types that numpy lacks are widened: their numbers are the same, and the name keeps how coarse they are. So everything in
this room computes with numpy alone, and two recordings are compared without torch; a tensor is turned into a value at
the door (`value_of`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CHUNK", "Array", "Comparable", "Value", "pieces", "value_of"]

Array: TypeAlias = np.ndarray
Comparable: TypeAlias = "Value | Tensor | Array"

# Elements in a piece: small enough that a few of them, widened to float64, stay in a core's second-level cache.
CHUNK = 1 << 17


@final
@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """The numbers of a tensor and the name of the dtype that they were rounded to."""

    array: Array
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes."""
        return self.array.shape

    @property
    def is_complex(self) -> bool:
        """Whether its numbers have an imaginary part."""
        return self.array.dtype.kind == "c"

    def real(self) -> Array:
        """Real numbers with the same information: a complex number is a pair along one more axis."""
        if not self.is_complex:
            return self.array
        part = np.float64 if self.array.dtype.itemsize == 16 else np.float32
        return np.ascontiguousarray(self.array).view(part).reshape(*self.shape, 2)

    def wide(self) -> npt.NDArray[np.float64]:
        """A float64 copy of `real`, which nobody else has."""
        return self.real().astype(np.float64)


def value_of(thing: Comparable) -> Value:
    """Whatever holds numbers, as a value. Raises `CompareError` for a tensor that holds none."""
    if isinstance(thing, Value):
        return thing
    if isinstance(thing, np.ndarray):
        return Value(thing, thing.dtype.name)
    from torchtap.comparison.measure.tensors import value_of_tensor

    return value_of_tensor(thing)


def pieces(left: Array, right: Array, chunk: int = CHUNK) -> Iterator[tuple[int, Array, Array]]:
    """Yield ``(offset, flat piece, flat piece)``: the same elements of two arrays of one shape, in row-major order.

    Every element comes once, whatever the strides, and no piece is larger than asked for.
    """
    if left.size == 0:
        return
    if left.flags.c_contiguous and right.flags.c_contiguous:
        flat_left, flat_right = left.reshape(-1), right.reshape(-1)
        for start in range(0, flat_left.size, chunk):
            yield start, flat_left[start : start + chunk], flat_right[start : start + chunk]
        return
    yield from _strided(left, right, 0, chunk)


def _strided(left: Array, right: Array, offset: int, chunk: int) -> Iterator[tuple[int, Array, Array]]:
    if left.size <= chunk or not left.ndim:
        yield offset, left.reshape(-1), right.reshape(-1)
        return
    inner = left.size // len(left)
    if inner > chunk:
        for row in range(len(left)):
            yield from _strided(left[row], right[row], offset + row * inner, chunk)
        return
    rows = max(1, chunk // inner)
    for row in range(0, len(left), rows):
        yield offset + row * inner, left[row : row + rows].reshape(-1), right[row : row + rows].reshape(-1)
