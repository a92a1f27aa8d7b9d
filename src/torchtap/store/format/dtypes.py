"""The element types a run can hold, by three names: torch's, safetensors' and numpy's.

A pure table: no torch. Types that safetensors has no code for are stored as bytes (``U8`` with one more
dimension) and their own name is noted beside the tensor, so that any safetensors reader still opens the
file.

Element types that numpy does not have, widened to float32 exactly (complex32 to complex64).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError

__all__ = ["BY_CODE", "BY_NAME", "StoredType", "widen"]


@final
@dataclass(frozen=True, slots=True)
class StoredType:
    """One element type."""

    name: str  # torch's spelling, without "torch."
    code: str  # safetensors' spelling; "U8" where it has none
    size: int  # bytes of one element
    numpy: str | None  # numpy's spelling, None where numpy has no such type

    @property
    def native(self) -> bool:
        """Whether safetensors has a code for it."""
        return self.name == "uint8" or self.code != "U8"


_TYPES = (
    StoredType("bool", "BOOL", 1, "bool"),
    StoredType("uint8", "U8", 1, "uint8"),
    StoredType("int8", "I8", 1, "int8"),
    StoredType("uint16", "U16", 2, "uint16"),
    StoredType("int16", "I16", 2, "int16"),
    StoredType("uint32", "U32", 4, "uint32"),
    StoredType("int32", "I32", 4, "int32"),
    StoredType("uint64", "U64", 8, "uint64"),
    StoredType("int64", "I64", 8, "int64"),
    StoredType("float16", "F16", 2, "float16"),
    StoredType("bfloat16", "BF16", 2, None),
    StoredType("float32", "F32", 4, "float32"),
    StoredType("float64", "F64", 8, "float64"),
    StoredType("float8_e4m3fn", "F8_E4M3", 1, None),
    StoredType("float8_e5m2", "F8_E5M2", 1, None),
    StoredType("float8_e8m0fnu", "F8_E8M0", 1, None),
    StoredType("float8_e4m3fnuz", "F8_E4M3FNUZ", 1, None),
    StoredType("float8_e5m2fnuz", "F8_E5M2FNUZ", 1, None),
    StoredType("complex64", "C64", 8, "complex64"),
    StoredType("complex32", "U8", 4, None),
    StoredType("complex128", "U8", 16, "complex128"),
    StoredType("float4_e2m1fn_x2", "U8", 1, None),
)

BY_NAME = {stored.name: stored for stored in _TYPES}
BY_CODE = {stored.code: stored for stored in _TYPES if stored.native}


# exponent bits, mantissa bits, bias, and which codes are not numbers
_EIGHT_BITS = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _eight_bits(name: str) -> npt.NDArray[np.float32]:
    """The value of each of the 256 codes."""
    codes = np.arange(256)
    if name == "float8_e8m0fnu":
        return np.where(codes == 255, np.nan, np.exp2(codes - 127.0)).astype(np.float32)
    exponent_bits, mantissa_bits, bias, special = _EIGHT_BITS[name]
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * np.exp2(exponent - float(bias))
    )
    if special == "ieee":
        value = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), value)
    elif special == "fn":
        value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    value = np.where(codes >= 128, -value, value)
    if special == "fnuz":
        value = np.where(codes == 128, np.nan, value)
    return value.astype(np.float32)


def widen(raw: bytearray | memoryview, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers that the bytes stand for."""
    if name == "bfloat16":
        wide = np.frombuffer(raw, "<u2").astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32).reshape(shape)
    if name == "complex32":
        return np.frombuffer(raw, "<f2").astype(np.float32).view(np.complex64).reshape(shape)
    if name in _EIGHT_BITS or name == "float8_e8m0fnu":
        return _eight_bits(name)[np.frombuffer(raw, np.uint8)].reshape(shape)
    if name == "float4_e2m1fn_x2":  # two numbers a byte, the low half first
        table = np.array([*_FOUR_BITS, *(-value for value in _FOUR_BITS)], np.float32)
        codes = np.frombuffer(raw, np.uint8)
        both = np.empty((len(codes), 2), np.float32)
        both[:, 0], both[:, 1] = table[codes & 15], table[codes >> 4]
        return both.reshape((*shape[:-1], 2 * shape[-1]) if shape else (2,))
    raise RunCorruptError(f"there is no way to show {name} in numpy")
