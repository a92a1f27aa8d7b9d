"""What is known of the element types, by torch's names for them: their resolution, their steps, their edges.

A table, so that two recordings can be compared without torch. Integers and booleans have no rounding: resolution 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["FARTHEST", "DType", "coarser", "extreme", "is_floating", "name_of", "resolution", "ulp_step"]

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
    """Whether it holds rounded real numbers."""
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
