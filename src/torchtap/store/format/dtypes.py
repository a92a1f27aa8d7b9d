"""The element types a run can hold, by three names: torch's, safetensors' and numpy's.

A pure table: no torch. Types that safetensors has no code for are stored as bytes (``U8`` with one more
dimension) and their own name is noted beside the tensor, so that any safetensors reader still opens the
file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["BY_CODE", "BY_NAME", "StoredType"]


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
