"""Several scalar segments written as one, a stretch at a time.

Memory does not grow with the segments: values flow through one buffer, and are verified against the sources' checksums
before the merged segment appears.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError
from torchtap.store.files.destination import Destination
from torchtap.store.files.folder import OpenFile
from torchtap.store.files.layout import SegmentName
from torchtap.store.format.checksum import CHUNK, ChunkedChecksum, parse_checksums
from torchtap.store.format.header import HeaderEntry, encode_header
from torchtap.store.format.notes import segment_note
from torchtap.store.format.scalars import CLOCK
from torchtap.store.format.segment import Segment

__all__ = ["merge_scalars"]

_BUFFER = 1 << 20


@final
@dataclass(slots=True, eq=False)
class _Group:
    """One grid over all sources that have it."""

    sites: int
    statistics: int
    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    present: list[npt.NDArray[np.uint8] | None] = field(default_factory=list)
    values: list[tuple[Segment, HeaderEntry]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def presence(self) -> npt.NDArray[np.uint8] | None:
        if all(mask is None for mask in self.present):
            return None
        masks = [
            np.ones((self.sites, len(rows)), np.uint8) if mask is None else mask
            for rows, mask in zip(self.rows, self.present, strict=True)
        ]
        return np.concatenate(masks, axis=1)


@final
class _Forward:
    """An entry of an open file, read from its beginning to its end and verified on the way."""

    def __init__(self, file: OpenFile, segment: Segment, entry: HeaderEntry) -> None:
        self._file = file
        self._offset = segment.header.data_start + entry.start
        chunk, self._expected = parse_checksums(segment.header.facts(entry.name), entry.nbytes)
        self._checksum = ChunkedChecksum(chunk)

    def fill(self, buffer: memoryview) -> None:
        self._file.read_into(self._offset, buffer)
        self._offset += len(buffer)
        self._checksum.update(buffer)

    def verify(self) -> None:
        # an empty entry has one checksum, of nothing
        if (self._checksum.result() or ["00000000"]) != self._expected:
            raise RunCorruptError("its bytes are not those that were written (the checksum differs)")


def merge_scalars(place: Destination, sources: list[SegmentName], merged: SegmentName) -> int:
    """Write the segment that covers ``sources``. Returns its size."""
    phases: dict[str, int] = {}
    clocks: dict[str, list[np.ndarray]] = {name: [] for name in CLOCK}
    groups: dict[str, _Group] = {}
    start = 0
    for segment in [Segment(place.folder, name) for name in sources]:
        for name, (code, kind) in CLOCK.items():
            clocks[name].append(segment.array(segment.entry(f"clock.{name}", code), kind))
        renumbered = [phases.setdefault(str(phase), len(phases)) for phase in segment.note["phases"]]
        clocks["phase"][-1] = np.array(renumbered, np.uint8)[clocks["phase"][-1]]
        _gather(segment, start, groups)
        start += len(clocks["step"][-1])
    clock = [(f"clock.{name}", code, np.concatenate(clocks[name])) for name, (code, _) in CLOCK.items()]
    notes = {"torchtap": segment_note(merged, place.part, phases=list(phases))}
    notes |= {f"grid{number}": note for number, note in enumerate(groups)}
    return _write(place, merged, [*clock, *_columns(groups.values())], list(groups.values()), notes)


def _columns(groups: Iterable[_Group]) -> list[tuple[str, str, np.ndarray]]:
    """Each grid's rows, then the masks of those that do not have every value."""
    numbered = list(enumerate(groups))
    masks = [(number, group.presence()) for number, group in numbered]
    return [
        *((f"grid{number}.rows", "I64", np.concatenate(group.rows)) for number, group in numbered),
        *((f"grid{number}.present", "BOOL", mask) for number, mask in masks if mask is not None),
    ]


def _gather(segment: Segment, start: int, groups: dict[str, _Group]) -> None:
    """Add a segment's grids to the groups; ``start`` is where its rows begin in the merged clock."""
    number = 0
    while (note := segment.header.metadata.get(f"grid{number}")) is not None:
        entry = segment.entry(f"grid{number}.values", "F64")
        group = groups.setdefault(note, _Group(entry.shape[1], entry.shape[0]))
        group.rows.append(segment.array(segment.entry(f"grid{number}.rows", "I64"), "<i8") + start)
        mask = segment.header.entries.get(f"grid{number}.present")
        group.present.append(None if mask is None else segment.array(mask, "|u1"))
        group.values.append((segment, entry))
        number += 1


def _write(
    place: Destination,
    merged: SegmentName,
    small: list[tuple[str, str, np.ndarray]],
    groups: list[_Group],
    notes: dict[str, str],
) -> int:
    entries: list[HeaderEntry] = []
    offset = 0

    def add(name: str, code: str, shape: tuple[int, ...], nbytes: int) -> None:
        nonlocal offset
        entries.append(HeaderEntry(name, code, shape, offset, offset + nbytes))
        # checksums have one width, so the head's length is known before their values are
        notes[name] = _checksum_note(["00000000"] * max(1, -(-nbytes // CHUNK)))
        offset += nbytes

    # eight-byte numbers first, then bytes, so that all numbers lie aligned
    numbers = [array for array in small if array[2].itemsize == 8]
    bytes_ = [array for array in small if array[2].itemsize == 1]
    for name, code, array in numbers:
        add(name, code, array.shape, array.nbytes)
    for number, group in enumerate(groups):
        shape = (group.statistics, group.sites, group.length)
        add(f"grid{number}.values", "F64", shape, group.sites * group.statistics * group.length * 8)
    for name, code, array in bytes_:
        add(name, code, array.shape, array.nbytes)

    stream = place.stream(len(encode_header(entries, notes)))
    try:
        for name, _, array in numbers:
            notes[name] = _append(stream.append, iter([array.reshape(-1).view(np.uint8).data]))
        for number, group in enumerate(groups):
            with ExitStack() as files:
                notes[f"grid{number}.values"] = _append(stream.append, _values(group, files))
        for name, _, array in bytes_:
            notes[name] = _append(stream.append, iter([array.reshape(-1).view(np.uint8).data]))
        head = encode_header(entries, notes)
        stream.commit(merged.file, head)
    except BaseException:
        stream.abort()
        raise
    return len(head) + offset


def _checksum_note(crcs: list[str]) -> str:
    facts: dict[str, Any] = {"crc32": crcs, "chunk": CHUNK} if len(crcs) > 1 else {"crc32": crcs[0]}
    return json.dumps(facts, separators=(",", ":"))


def _append(append: Any, pieces: Iterator[memoryview]) -> str:
    checksum = ChunkedChecksum()
    for piece in pieces:
        checksum.update(piece)
        append(piece)
    return _checksum_note(checksum.result() or ["00000000"])


def _values(group: _Group, files: ExitStack) -> Iterator[memoryview]:
    """The grid's values, series after series, each over the rows of all sources."""
    readers = [
        _Forward(files.enter_context(segment.open()), segment, entry) for segment, entry in group.values
    ]
    series, length = group.sites * group.statistics, group.length
    at_once = max(1, _BUFFER // max(8 * length, 1))
    joined = np.empty((min(at_once, series), length), "<f8")
    for first in range(0, series, at_once):
        count = min(at_once, series - first)
        column = 0
        for reader, rows in zip(readers, group.rows, strict=True):
            piece = np.empty((count, len(rows)), "<f8")
            reader.fill(piece.reshape(-1).view(np.uint8).data)
            joined[:count, column : column + len(rows)] = piece
            column += len(rows)
        yield joined[:count].reshape(-1).view(np.uint8).data
    for reader in readers:
        reader.verify()
