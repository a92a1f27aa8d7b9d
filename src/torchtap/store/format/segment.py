"""One segment file as a reader sees it: a checked head, and bytes that are verified when read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import numpy as np

from torchtap.errors import RunCorruptError, RunError, RunFormatError
from torchtap.store.files.folder import Folder, OpenFile
from torchtap.store.files.layout import FORMAT_VERSION, PartOf, SegmentName
from torchtap.store.format.checksum import checksum, parse_checksums, verify
from torchtap.store.format.header import Header, HeaderEntry, parse_header
from torchtap.store.format.notes import check_part, named_by

__all__ = ["Segment"]

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
        """The file itself."""
        return self._folder.open(self.file)

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
