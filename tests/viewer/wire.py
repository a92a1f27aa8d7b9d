"""Read the server's binary answers, as the page does."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np

__all__ = ["unpack"]

_DTYPES = {"f4": np.dtype("<f4"), "f8": np.dtype("<f8"), "u1": np.dtype("|u1"), "i4": np.dtype("<i4")}


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the facts and the arrays of a packed answer."""
    (length,) = struct.unpack_from("<I", body)
    facts = json.loads(body[4 : 4 + length])
    start = 4 + length
    arrays = {}
    for entry in facts.pop("arrays"):
        count = math.prod(entry["shape"])
        flat = np.frombuffer(body, _DTYPES[entry["dtype"]], count, start + entry["offset"])
        arrays[entry["name"]] = flat.reshape(entry["shape"])
    return facts, arrays
