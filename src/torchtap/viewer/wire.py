"""How numbers travel to the page: one small JSON header, then plain arrays, little-endian.

    4 bytes   length of the header
    header    JSON: whatever facts the answer has, and ``arrays``: name, dtype, shape and offset of each
    padding   to a multiple of eight
    arrays    one after the other, each aligned to eight bytes

Guarantees: a header never holds a number that JSON does not know (they become null) nor a text that JavaScript would
trip over, and the page can view each array where it lies, without copying.

Not here: which numbers are sent (`routes`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchtap.sanitize import browser_text

__all__ = ["encode_json", "pack", "unpack"]

_NAMES = {"<f4": "f4", "<f8": "f8", "|u1": "u1", "<i4": "i4"}


def _plain(value: object) -> object:
    """``value`` with numpy scalars turned into Python's and everything that JSON cannot say into null."""
    if isinstance(value, Mapping):
        return {browser_text(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return browser_text(str(value))


def encode_json(value: object) -> bytes:
    """``value`` as JSON that every browser reads: a NaN or an infinity is null."""
    return json.dumps(_plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode(
        "ascii"
    )


def pack(facts: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> bytes:
    """``facts`` and ``arrays`` as one body."""
    entries: list[dict[str, object]] = []
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array)
        if data.dtype.str not in _NAMES:
            raise TypeError(f"array {name!r} has dtype {data.dtype}, which the page does not read")
        body = data.tobytes()
        entries.append(
            {"name": name, "dtype": _NAMES[data.dtype.str], "shape": list(data.shape), "offset": offset}
        )
        body += b"\0" * (-len(body) % 8)
        parts.append(body)
        offset += len(body)
    header = encode_json({**facts, "arrays": entries})
    header += b" " * (-(len(header) + 4) % 8)
    return b"".join([struct.pack("<I", len(header)), header, *parts])


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `pack` was given. The page has its own reader; this one is for tests and scripts."""
    (length,) = struct.unpack_from("<I", body)
    facts = json.loads(body[4 : 4 + length])
    start = 4 + length
    dtypes = {short: np.dtype(full) for full, short in _NAMES.items()}
    arrays = {}
    for entry in facts.pop("arrays"):
        count = math.prod(entry["shape"])
        flat = np.frombuffer(body, dtypes[entry["dtype"]], count, start + entry["offset"])
        arrays[entry["name"]] = flat.reshape(entry["shape"])
    return facts, arrays
