"""A few numbers of a value by which two sites are known to hold the same one, whatever their names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import CompareError, ReductionError
from torchtap.store.format.dtypes import widen

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "CHUNK",
    "FARTHEST",
    "Array",
    "Comparable",
    "DType",
    "Value",
    "coarser",
    "extreme",
    "is_floating",
    "name_of",
    "pieces",
    "resolution",
    "same_spelling",
    "signature",
    "ulp_step",
    "value_of",
    "value_of_tensor",
]

DType: TypeAlias = "str | torch.dtype | np.dtype[Any]"


class _Digits(NamedTuple):
    resolution: float  # relative distance of neighbouring numbers
    smallest_normal: float


_DIGITS = {
    "float64": _Digits(2.0**-52, 2.0**-1022),
    "float32": _Digits(2.0**-23, 2.0**-126),
    "float16": _Digits(2.0**-10, 2.0**-14),
    "bfloat16": _Digits(2.0**-7, 2.0**-126),
    "float8_e4m3fn": _Digits(2.0**-3, 2.0**-6),
    "float8_e4m3fnuz": _Digits(2.0**-3, 2.0**-7),
    "float8_e5m2": _Digits(2.0**-2, 2.0**-14),
    "float8_e5m2fnuz": _Digits(2.0**-2, 2.0**-15),
    "float8_e8m0fnu": _Digits(1.0, 2.0**-127),
    "float4_e2m1fn_x2": _Digits(0.5, 1.0),
}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}

# From where on a number stands for an infinity (`finfo.min` in an attention mask).
FARTHEST = 1e305
_EXTREME = {"float64": FARTHEST, "float32": 1e29, "bfloat16": 1e29, "float16": 0.98 * 65504.0}


def name_of(dtype: DType) -> str:
    """torch's name of a dtype, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _digits(dtype: DType) -> _Digits | None:
    name = name_of(dtype)
    return _DIGITS.get(_PARTS.get(name, name))


def is_floating(dtype: DType) -> bool:
    """Return True if it holds rounded real numbers."""
    return name_of(dtype) in _DIGITS


def resolution(dtype: DType) -> float:
    """The relative distance of neighbouring numbers of a dtype; 0 for integers and booleans."""
    digits = _digits(dtype)
    return 0.0 if digits is None else digits.resolution


def coarser(left: DType, right: DType) -> str:
    """Of two dtypes the one with fewer digits (an integer counts as exact)."""
    return name_of(left if resolution(left) >= resolution(right) else right)


def ulp_step(dtype: DType) -> tuple[float, float]:
    """(spacing relative to the power of two below a number, smallest spacing) of a dtype."""
    digits = _digits(dtype)
    if digits is None:
        return 0.0, 1.0
    return digits.resolution, max(digits.smallest_normal * digits.resolution, 5e-324)


def extreme(dtype: DType) -> float:
    """From where on a number of a dtype stands for an infinity."""
    return _EXTREME.get(name_of(dtype), FARTHEST)


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
        """Return True if its numbers have an imaginary part."""
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


# Types that numpy lacks and torch widens exactly, and what to.
_WIDER = {"bfloat16": "float32", "complex32": "complex64"}


def value_of_tensor(tensor: Tensor) -> Value:
    """The numbers of a tensor; raises `CompareError` when there are none."""
    import torch

    from torchtap.reduce.densify import densify

    tensor = tensor.detach()
    if tensor.is_meta:
        raise CompareError(
            f"a tensor on the meta device has no values to compare (shape {tuple(tensor.shape)})"
        )
    if tensor.is_nested:
        raise CompareError(
            "a nested tensor has no single shape to compare; compare its components, or pad it with "
            "torch.nested.to_padded_tensor first"
        )
    try:
        plain = densify(tensor)  # dense, opened, and with all of its memory
    except ReductionError as error:
        raise CompareError(f"a tensor of shape {tuple(tensor.shape)} cannot be compared: {error}") from error
    dtype = name_of(plain.dtype)
    plain = plain.to("cpu")
    if dtype in _WIDER:
        return Value(plain.to(getattr(torch, _WIDER[dtype])).numpy(), dtype)
    if dtype.startswith(("float8", "float4")):
        raw = plain.contiguous().view(torch.uint8).numpy()
        return Value(widen(raw.data, dtype, tuple(plain.shape)), dtype)
    try:
        return Value(plain.numpy(), dtype)
    except (TypeError, RuntimeError) as error:  # a type of packed bits
        raise CompareError(f"values of type {dtype} cannot be compared: {error}") from error


_FORBIDS = -9000.0  # the mildest number that was seen to stand for "do not look"


def same_spelling(left: Array, right: Array) -> tuple[Array, Array]:
    """Two values of one shape; where one is a boolean and the other an additive mask, both as additive masks."""
    if left.dtype == np.bool_ and right.dtype.kind == "f":
        return _spelled_like(left, right)
    if right.dtype == np.bool_ and left.dtype.kind == "f":
        additive, spelled = _spelled_like(right, left)
        return spelled, additive
    return left, right


def _spelled_like(booleans: Array, numbers: Array) -> tuple[Array, Array]:
    forbidden = numbers <= _FORBIDS
    if booleans.shape != numbers.shape or not forbidden.any() or not (forbidden | (numbers == 0)).all():
        return booleans, numbers
    hidden = booleans if np.array_equal(booleans, forbidden) else ~booleans
    return np.where(hidden, -np.inf, 0.0), np.where(forbidden, -np.inf, 0.0)


_ELEMENTS = 1 << 20  # of a larger value so many, evenly spaced, stand for all


def signature(value: Comparable) -> tuple[float, ...] | None:
    """``(size, three weighted sums)``, all on one scale; ``None`` for what has no finite elements or is constant.

    The weights differ from place to place, so that the same elements in another order have another signature.
    """
    flat = value_of(value).real().reshape(-1)
    if flat.size > _ELEMENTS:
        flat = flat[:: flat.size // _ELEMENTS]
    wide = flat.astype(np.float64)
    wide = np.where(np.isfinite(wide) & (np.abs(wide) < 1e29), wide, 0.0)
    size = float(np.linalg.norm(wide))
    if not 0.0 < size < math.inf or wide.size < 2 or bool((wide == wide[0]).all()):
        return None
    place = np.arange(1, wide.size + 1, dtype=np.float64)
    sums = (float((wide * np.sin(place * rate)).sum()) for rate in (1.0, 0.1, 0.01))
    return (size, *sums)
