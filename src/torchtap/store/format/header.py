"""The head of a safetensors file: written, and read as if it came from an enemy.

It guarantees, before anything else of a file is read: the head fits in the file and in ``MAX_HEADER``; it is the one
that was written, if it has a checksum (`seal`); each
entry has a known element type, a shape whose size is exactly that of its bytes, and bytes that lie within
the file and overlap with no other entry's. Anything else is a ``RunCorruptError``.

Not here: what the entries mean (`scalars`, `tensors`), where files are (`layout`, `place`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, final

from torchtap.errors import RunCorruptError
from torchtap.store.format.dtypes import BY_CODE
from torchtap.store.format.seal import JSON_LIMIT, is_sealed, load_json, seal

__all__ = ["MAX_HEADER", "Header", "HeaderEntry", "encode_header", "parse_header"]

MAX_HEADER = JSON_LIMIT
_MAX_DIMENSIONS = 64


class HeaderEntry(NamedTuple):
    """One array of a segment; ``start`` and ``stop`` count from the end of the head."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@final
@dataclass(frozen=True, slots=True)
class Header:
    """A checked head."""

    entries: dict[str, HeaderEntry]
    metadata: dict[str, str]
    data_start: int  # where in the file the data begins
    sealed: bool = False  # whether its checksum was verified; the first format has none

    def facts(self, key: str) -> dict[str, Any]:
        """The JSON object noted under ``key``; empty when there is none."""
        text = self.metadata.get(key)
        if text is None:
            return {}
        facts = load_json(text)
        if not isinstance(facts, dict):
            raise RunCorruptError(f"the note {key[:80]!r} is not a JSON object")
        return facts


def encode_header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str], *, reserve: int = 0) -> bytes:
    """The bytes before the data: length, JSON with its checksum, and spaces up to ``reserve`` or a multiple of 8.

    The first of the metadata is `segment_note`, which has the room for the checksum.
    """
    head: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        head[entry.name] = {
            "dtype": entry.code,
            "shape": entry.shape,
            "data_offsets": (entry.start, entry.stop),
        }
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    length = max(len(text), reserve - 8)
    length += -length % 8
    return length.to_bytes(8, "little") + seal(text.ljust(length))


def parse_header(read: Callable[[int, int], bytes], file_size: int) -> Header:
    """Read and check a head; ``read(offset, size)`` gives the file's bytes."""
    if file_size < 8:
        raise RunCorruptError(f"the file has {file_size} bytes, too few for a segment: its end is missing")
    length = int.from_bytes(read(0, 8), "little")
    if length > MAX_HEADER:
        raise RunCorruptError(f"its head claims {length} bytes; at most {MAX_HEADER} are accepted")
    if length > file_size - 8:
        raise RunCorruptError(f"its head claims {length} bytes, the file has {file_size}: its end is missing")
    raw = read(8, length)
    sealed = is_sealed(raw)
    head = load_json(raw)
    del raw
    if not isinstance(head, dict):
        raise RunCorruptError("its head is not a JSON object")
    metadata = head.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise RunCorruptError("its metadata is not a map of text to text")
    data_size = file_size - 8 - length
    entries = {name: _entry(name, facts, data_size) for name, facts in head.items()}
    _check_apart(entries.values())
    return Header(entries, metadata, 8 + length, sealed)


def _check_apart(entries: Iterable[HeaderEntry]) -> None:
    end = 0
    for entry in sorted(entries, key=itemgetter(3, 4)):
        if entry.start < end:
            raise RunCorruptError(f"the bytes of {entry.name[:80]!r} overlap with another entry's")
        end = entry.stop


def _entry(name: str, facts: object, data_size: int) -> HeaderEntry:
    # plain steps: a run can have a hundred thousand of these
    if type(facts) is not dict:
        raise RunCorruptError(f"the entry {name[:80]!r} is not one of safetensors")
    code, shape, offsets = facts.get("dtype"), facts.get("shape"), facts.get("data_offsets")
    if type(code) is not str or type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        raise RunCorruptError(f"the entry {name[:80]!r} is not one of safetensors")
    stored = BY_CODE.get(code)
    if stored is None:
        raise RunCorruptError(f"the entry {name[:80]!r} has the unknown element type {code[:40]!r}")
    for number in (*offsets, *shape):
        # bool is an int in Python, and JSON's true is not a length
        if type(number) is not int or not 0 <= number < 2**63:
            raise RunCorruptError(f"the entry {name[:80]!r} has a shape or offsets that are not sizes")
    if len(shape) > _MAX_DIMENSIONS:
        raise RunCorruptError(f"the entry {name[:80]!r} has {len(shape)} dimensions")
    start, stop = offsets
    if not start <= stop <= data_size:
        raise RunCorruptError(
            f"the entry {name[:80]!r} should end at byte {stop} of {data_size}: the file's end is missing"
        )
    if prod(shape) * stored.size != stop - start:
        raise RunCorruptError(
            f"the entry {name[:80]!r} has {stop - start} bytes, not those of {code} {shape}"
        )
    return HeaderEntry(name, code, tuple(shape), start, stop)
