"""Segments made by hand, with the right checksums: what a stranger can write who knows the format."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchtap.store.files.layout import SegmentName
from torchtap.store.format.checksum import seal
from torchtap.store.format.scalars import CLOCK
from torchtap.store.format.segment import segment_note

__all__ = ["crafted", "forget_run_id", "scalar_segment", "tensor_segment", "write_segment"]

_CODES = {"i8": "I64", "u1": "U8", "f8": "F64", "f4": "F32", "b1": "BOOL"}


def crafted(
    name: SegmentName,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    notes: Mapping[str, dict[str, Any]] | None = None,
    **facts: Any,
) -> bytes:
    """A segment's bytes. ``notes`` add to what is noted of an entry."""
    metadata = {"torchtap": segment_note(name, (0, 0), **facts)}
    head: dict[str, Any] = {"__metadata__": metadata}
    body, offset = [], 0
    for key, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        metadata[key] = json.dumps({"crc32": f"{zlib.crc32(data):08x}", **(notes or {}).get(key, {})})
        code = _CODES[array.dtype.str[1:]]
        head[key] = {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, offset + len(data)]}
        body.append(data)
        offset += len(data)
    for key, facts_ in (notes or {}).items():
        if key not in arrays:
            metadata[key] = json.dumps(facts_)
    text = seal(json.dumps(head, separators=(",", ":")).encode())
    return len(text).to_bytes(8, "little") + text + b"".join(body)


def scalar_segment(
    name: SegmentName,
    steps: list[int],
    sites: list[str],
    values: Any = 0.0,
    phases: tuple[str, ...] = ("train",),
) -> bytes:
    """One grid of one statistic."""
    rows = len(steps)
    columns = {
        f"clock.{column}": np.array(steps if column == "step" else [0] * rows, dtype=kind)
        for column, (_, kind) in CLOCK.items()
    }
    grid = np.broadcast_to(np.asarray(values, "<f8"), (1, len(sites), rows))
    arrays = {**columns, "grid0.rows": np.arange(rows, dtype="<i8"), "grid0.values": grid}
    return crafted(name, arrays, {"grid0": {"sites": sites, "statistics": ["mean"]}}, phases=list(phases))


def tensor_segment(name: SegmentName, site: str, array: np.ndarray[Any, Any], **note: Any) -> bytes:
    """One tensor of one site."""
    key = f"{name.low}/full/value/{site}"
    return crafted(name, {key: array}, {key: note})


def forget_run_id(part: Path) -> None:
    """Make an attempt like one of an older torchtap, whose manifest has no id to check files against."""
    path = part / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("run_id", None)
    manifest = {"check": "00000000", **{name: fact for name, fact in manifest.items() if name != "check"}}
    path.write_bytes(seal(json.dumps(manifest).encode()))


def write_segment(part: Path, name: SegmentName, content: bytes) -> Path:
    forget_run_id(part)
    path = part / name.file
    path.write_bytes(content)
    return path
