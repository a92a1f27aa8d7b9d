"""Element types that numpy does not have, widened to float32 exactly (complex32 to complex64)."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError

__all__ = ["widen"]

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
