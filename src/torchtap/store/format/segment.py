"""The head of a safetensors file: written, and read as if it came from an enemy.

It guarantees, before anything else of a file is read: the head fits in the file and in ``MAX_HEADER``; it is the one
that was written, if it has a checksum (`seal`); each
entry has a known element type, a shape whose size is exactly that of its bytes, and bytes that lie within
the file and overlap with no other entry's. Anything else is a ``RunCorruptError``.

Not here: what the entries mean (`scalars`, `tensors`), where files are (`layout`, `place`).

The note under ``torchtap`` that every segment has: which format, whose part, which flushes, which steps.

A file's name and folder say the same. Where the name differs the file was renamed, and the note, which has a checksum,
counts. Where the folder differs the file was moved there from another rank or attempt, and is not what it stands for.

One segment file as a reader sees it: a checked head, and bytes that are verified when read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, final

import numpy as np

from torchtap.errors import RunCorruptError, RunError, RunFormatError
from torchtap.store.files.folder import Folder, OpenFile
from torchtap.store.files.layout import FORMAT_VERSION, RUN_ID, PartOf, SegmentName
from torchtap.store.format.checksum import (
    JSON_LIMIT,
    UNSEALED,
    checksum,
    is_sealed,
    load_json,
    parse_checksums,
    seal,
    verify,
)
from torchtap.store.format.dtypes import BY_CODE

__all__ = [
    "MAX_HEADER",
    "Header",
    "HeaderEntry",
    "Segment",
    "check_part",
    "encode_header",
    "named_by",
    "parse_header",
    "segment_note",
]


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


def encode_header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the data: length, JSON with its checksum, and spaces up to a multiple of 8.

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
    length = len(text) + -len(text) % 8
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


def segment_note(name: SegmentName, part: PartOf, *, run_id: str | None = None, **facts: object) -> str:
    """Return the note of a segment. It begins with the room for the head's checksum."""
    start = {"format": FORMAT_VERSION, "check": UNSEALED, "kind": name.kind}
    where: dict[str, object] = {
        "part": list(part),
        "flushes": [name.first, name.last],
        "steps": [name.low, name.high],
    }
    if run_id is not None:
        where[RUN_ID] = run_id
    return json.dumps({**start, **where, **facts}, separators=(",", ":"))


def named_by(note: dict[str, object], file: SegmentName) -> SegmentName:
    """The name that a note gives its segment; that of the file where the note, of the first format, says nothing."""
    if note.get("format") == 1:
        return file
    match note:
        case {"flushes": [int(first), int(last)], "steps": [int(low), int(high)]}:
            if 0 <= first <= last < 10**12 and low <= high and abs(low) < 2**63 and abs(high) < 2**63:
                return SegmentName(file.kind, first, last, low, high)
    raise RunCorruptError("its note does not say which flushes and steps it holds")


def check_part(said: object, part: PartOf) -> None:
    """Raise where a file says that it is another part's; the first runs say nothing."""
    if said is not None and said != list(part):
        match said:
            case [int(rank), int(attempt)]:
                raise RunCorruptError(f"it was moved here: it is of rank {rank}, attempt {attempt}")
        raise RunCorruptError("it does not say whose part it is")


_HOLES_FROM = 16 << 20
_VERIFIED_FIRST = (
    48 << 20
)  # entries with one checksum and more bytes are read twice, the first time in pieces
_PIECE = 4 << 20


def _check_version(version: object, least: int, sealed: bool) -> None:
    if type(version) is not int or version > FORMAT_VERSION:
        raise RunFormatError(
            f"its format is version {str(version)[:20]!r}; this torchtap reads up to {FORMAT_VERSION}"
        )
    if version < least or (version > 1 and not sealed):
        raise RunCorruptError("its head has no checksum, which its format asks for")


@final
class _Held:
    """A file that its opener closes."""

    def __init__(self, file: OpenFile) -> None:
        self.size, self.allocated, self.stamp = file.size, file.allocated, file.stamp
        self.read, self.read_into = file.read, file.read_into

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *error: object) -> None:
        return None


@final
class Segment:
    """A safetensors file of a run. The head is read when it is made; data only when asked for.

    ``name`` is what the segment holds by its own note; ``file`` is where it is, which may say something else. A segment
    of another ``part`` is refused.
    """

    def __init__(
        self, folder: Folder, file: SegmentName, *, least_format: int = 1, part: PartOf | None = None
    ) -> None:
        self.file = file.file
        self._folder = folder
        self._held: OpenFile | None = None
        with folder.open(self.file) as opened:
            if file.kind == "scalars" and opened.size > _HOLES_FROM and opened.allocated * 64 < opened.size:
                raise RunCorruptError(
                    f"it claims {opened.size} bytes, of which the disk holds {opened.allocated}: it is made of holes"
                )
            self.header: Header = parse_header(opened.read, opened.size)
        self.note = self.header.facts("torchtap")
        _check_version(self.note.get("format"), least_format, self.header.sealed)
        if self.note.get("kind") != file.kind:
            raise RunCorruptError(
                f"it holds {str(self.note.get('kind'))[:20]!r}, its name says {file.kind!r}"
            )
        if part is not None:
            check_part(self.note.get("part"), part)
        self.name = named_by(self.note, file)

    def open(self) -> OpenFile:
        """Open the file."""
        return self._folder.open(self.file) if self._held is None else _Held(self._held)

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """Read everything inside this block from one open file."""
        with self._folder.open(self.file) as self._held:
            try:
                yield
            finally:
                self._held = None

    @property
    def grids(self) -> int:
        """Return the number of grids of a scalar segment."""
        count = 0
        while f"grid{count}" in self.header.metadata:
            count += 1
        return count

    def entry(self, name: str, code: str, shape: tuple[int, ...] | None = None) -> HeaderEntry:
        """An entry that must be there and be of this type and shape."""
        entry = self.header.entries.get(name)
        if entry is None or entry.code != code or (shape is not None and entry.shape != shape):
            raise RunCorruptError(
                f"its entry {name!r} is missing or has another type or shape than it should"
            )
        return entry

    def read(self, entry: HeaderEntry) -> bytearray:
        """All bytes of an entry, verified."""
        return self.read_ranges(entry, [(0, entry.nbytes)])[0]

    def pieces(self, entry: HeaderEntry, size: int) -> Iterator[memoryview]:
        """All bytes of an entry in order, ``size`` at a time, in two buffers that take turns: while one piece is looked
        at, the next can be read.

        What was read is known to be right only once all of it was: the end raises when it was not.
        """
        chunk, crcs = parse_checksums(self.header.facts(entry.name), entry.nbytes)
        if len(crcs) > 1:
            size = max(chunk, size // chunk * chunk)
        buffers = [
            memoryview(bytearray(min(size, entry.nbytes))) for _ in range(2 if size < entry.nbytes else 1)
        ]
        current = 0
        with self.open() as file:
            for low in range(0, entry.nbytes, size):
                buffers.reverse()
                part = buffers[0][: min(size, entry.nbytes - low)]
                file.read_into(self.header.data_start + entry.start + low, part)
                if len(crcs) > 1:
                    for start in range(0, len(part), chunk):
                        verify(part[start : start + chunk], crcs[(low + start) // chunk])
                else:
                    current = checksum(part, current)
                yield part
        if len(crcs) == 1 and f"{current:08x}" != crcs[0]:
            raise RunCorruptError("its bytes are not those that were written (the checksum differs)")

    def array(self, entry: HeaderEntry, kind: str) -> np.ndarray:
        """An entry as a numpy array of dtype ``kind``."""
        return np.frombuffer(self.read(entry), dtype=kind).reshape(entry.shape)

    def read_ranges(self, entry: HeaderEntry, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        """Several stretches of an entry (from, to), verified; little more than them is read."""
        chunk, crcs = parse_checksums(self.header.facts(entry.name), entry.nbytes)
        results = []
        with self.open() as file:
            held: tuple[int, int, memoryview] = (0, 0, memoryview(b""))  # the stretch that was read last
            for start, stop in ranges:
                low, high = start // chunk * chunk, min(-(-stop // chunk) * chunk, entry.nbytes)
                if start == stop:
                    results.append(bytearray())
                    continue
                if not (held[0] <= low and high <= held[1]):
                    held = (low, high, self._read_chunks(file, entry, low, high, chunk, crcs))
                if (held[0], held[1]) == (start, stop) and isinstance(held[2].obj, bytearray):
                    results.append(held[2].obj)
                    held = (0, 0, memoryview(b""))
                else:
                    results.append(bytearray(held[2][start - held[0] : stop - held[0]]))
        return results

    def _read_chunks(
        self, file: OpenFile, entry: HeaderEntry, low: int, high: int, chunk: int, crcs: list[str]
    ) -> memoryview:
        if high - low > _VERIFIED_FIRST and chunk >= high - low:
            for _ in self.pieces(entry, _PIECE):
                pass  # it ends in an error when the bytes are not right, before memory is taken for all of them
        try:
            buffer = memoryview(bytearray(high - low))
        except (MemoryError, OverflowError):
            raise RunError(
                f"the entry {entry.name[:80]!r} has {high - low} bytes, for which there is no memory"
            ) from None
        file.read_into(self.header.data_start + entry.start + low, buffer)
        for start in range(low, high, chunk):
            verify(buffer[start - low : min(start + chunk, high) - low], crcs[start // chunk])
        return buffer
