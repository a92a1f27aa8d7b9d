"""Write records, tensors and events as few files while they grow.

Each flush writes the items that no file holds yet. If the files before it are not larger, it writes their items again
with its own into one file, which then replaces them. The items of these files are still in memory, so nothing is read
back. After n flushes there are about log2(n) small files beside the full ones, and an item is written at most that
often. Once the items reach `FULL` bytes they are one file and are released.

The new file appears before the files that it replaces are removed. At every moment, also if the process is killed, the
widest files hold everything exactly once (`layout.widest`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, final

from torchtap.store.files.folder import Destination
from torchtap.store.files.layout import Kind, SegmentName
from torchtap.store.format.checksum import checksum
from torchtap.store.format.payload import TRAINING, Compressor, Payload, TensorName, payload_of
from torchtap.store.format.segment import HeaderEntry, encode_header, segment_note
from torchtap.store.record import TensorItem

__all__ = ["ENTRY_COST", "FULL", "EventLines", "Items", "Segments", "TensorItems"]

FULL: dict[Kind, int] = {"scalars": 8 << 20, "tensors": 8 << 20, "events": 1 << 20}
ENTRY_COST = 16 << 10  # so many bytes of data are as much of a burden to a reader as one more entry
Buffers = list[bytes | memoryview]


class Items(Protocol):
    """Items of one kind in the order of their arrival, held until they are in a full file."""

    kind: Kind

    @property
    def count(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the smallest and the largest step of some items."""

    def encode(self, name: SegmentName, place: Destination, start: int, stop: int) -> Buffers:
        """Return the bytes of the file of this name with some items."""

    def drop(self, count: int) -> None:
        """Release the first ``count`` items."""


class _File(NamedTuple):
    """A file that the next flush may replace."""

    name: SegmentName
    start: int  # of its items
    nbytes: int


def _unnoticed(name: SegmentName, nbytes: int, replaced: Sequence[SegmentName]) -> None: ...


@final
class Segments:
    """The files of one kind of one attempt. Used by one thread.

    ``appeared`` is called with each new file, its size and the files that it replaces.
    """

    def __init__(
        self,
        place: Destination,
        items: Items,
        appeared: Callable[[SegmentName, int, Sequence[SegmentName]], None] = _unnoticed,
    ) -> None:
        self.items = items
        self.flushes = 0  # how many files were begun
        self._place = place
        self._appeared = appeared
        self._files: list[_File] = []
        self._held = 0  # items that are in files
        self._held_bytes = 0

    @property
    def pending(self) -> int:
        """Return how many items no file holds yet."""
        return self.items.count - self._held

    @property
    def pending_bytes(self) -> int:
        return self.items.nbytes - self._held_bytes

    def flush(self) -> None:
        """Write what is pending. Raise ``OSError`` if that fails; it is still pending then."""
        stop, nbytes = self.items.count, self.items.nbytes
        if stop == self._held:
            return
        new, full = nbytes - self._held_bytes, nbytes >= FULL[self.items.kind]
        replaced: list[_File] = []
        for file in reversed(self._files if new < FULL[self.items.kind] else []):
            if not full and file.nbytes > new + sum(each.nbytes for each in replaced):
                break
            replaced.insert(0, file)
        try:
            self._write(replaced, stop, new, self.flushes)
        except OSError:  # a full disk may still have room for the new items alone
            if not replaced:
                raise
            self._write([], stop, new, self.flushes)
        self.flushes += 1
        self._held, self._held_bytes = stop, nbytes
        if full:
            self.release()

    def finish(self) -> None:
        """Write the items of several small files as one."""
        if len(self._files) > 1:
            self._write(list(self._files), self._held, 0, self.flushes - 1)

    def release(self) -> None:
        """Release the items that files hold: later flushes do not replace these files."""
        self.items.drop(self._held)
        self._files, self._held, self._held_bytes = [], 0, 0

    def discard(self) -> None:
        """Forget what is pending, and release the rest."""
        self.items.drop(self.items.count)
        self._files, self._held, self._held_bytes = [], 0, 0

    def _write(self, replaced: list[_File], stop: int, new: int, last: int) -> None:
        start, first = self._held, last
        if replaced:
            start, first = replaced[0].start, replaced[0].name.first
        names = [file.name for file in replaced]
        name = SegmentName(self.items.kind, first, last, *self.items.span(start, stop))
        buffers = self.items.encode(name, self._place, start, stop)
        self._place.put(name.file, buffers, [each.file for each in names])
        nbytes = new + sum(file.nbytes for file in replaced)
        self._files[len(self._files) - len(replaced) :] = [_File(name, start, nbytes)]
        self._appeared(name, sum(map(len, buffers)), names)


@final
class EventLines:
    """Events as lines of JSON. Any thread may append: every operation on the list is one that cannot be interrupted."""

    kind: Kind = "events"

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    @property
    def count(self) -> int:
        return len(self._lines)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._lines))

    def append(self, line: bytes) -> None:
        self._lines.append(line)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        return 0, 0

    def encode(self, name: SegmentName, place: Destination, start: int, stop: int) -> Buffers:
        return [b"\n".join([*self._lines[start:stop], b""])]

    def drop(self, count: int) -> None:
        del self._lines[:count]


class _Entry(NamedTuple):
    """A tensor, or the indices of a sparse one, as it will lie in a file."""

    name: TensorName
    code: str
    shape: tuple[int, ...]
    buffer: memoryview
    note: str


@final
class TensorItems:
    """Tensors as entries of a safetensors file.

    An entry is called ``<step>/<reduction>/<field>/<site>``; of a phase other than ``train`` it has ``<step>@<phase>``,
    and a second one of the same name has ``<step>~1``. Its note has the crc32 and whatever the dtype and shape of the
    entry cannot say (see `payload`).
    """

    kind: Kind = "tensors"

    def __init__(self, compressor: Compressor | None = None) -> None:
        self._compressor = compressor
        self._entries: list[_Entry] = []
        self._names: set[TensorName] = set()
        self.nbytes = 0

    @property
    def count(self) -> int:
        return len(self._entries)

    def tensors(self, start: int) -> int:
        """Return how many tensors there are from an entry on."""
        return sum(not entry.name.indices for entry in self._entries[start:])

    def add(self, step: int, item: TensorItem, phase: str = TRAINING) -> None:
        """Add a tensor. Raise if it is of a dtype or layout that a run cannot hold."""
        payload = payload_of(item.value)
        name = TensorName(step, item.reduction, item.field, item.site, phase=phase)
        while name in self._names:
            name = name._replace(copy=name.copy + 1)
        self._names.add(name)
        if payload.indices is not None:
            self._append(name._replace(indices=True), payload.indices)
        self._append(name, payload)

    def _append(self, name: TensorName, payload: Payload) -> None:
        facts, stored, buffer, crc = payload.notes, payload.type, payload.buffer, payload.checksum
        code, shape = stored.code, payload.shape
        if not stored.native:
            facts, shape = facts | {"dtype": stored.name}, (*shape, stored.size)
        packed = self._compressor(buffer, stored.size) if self._compressor and len(buffer) else None
        if packed is not None:
            facts = facts | {"codec": "zstd", "dtype": stored.name, "stored_shape": list(payload.shape)}
            code, shape, buffer, crc = "U8", (len(packed),), memoryview(packed), None
        facts = facts | {"crc32": f"{checksum(buffer) if crc is None else crc:08x}"}
        note = json.dumps(facts, separators=(",", ":"))
        self._entries.append(_Entry(name, code, shape, buffer, note))
        self.nbytes += len(buffer) + ENTRY_COST

    def span(self, start: int, stop: int) -> tuple[int, int]:
        steps = [entry.name.step for entry in self._entries[start:stop]]
        return min(steps), max(steps)

    def encode(self, name: SegmentName, place: Destination, start: int, stop: int) -> Buffers:
        head: list[HeaderEntry] = []
        notes = {"torchtap": segment_note(name, place.part, run_id=place.run_id)}
        offset = 0
        for entry in self._entries[start:stop]:
            text, end = str(entry.name), offset + len(entry.buffer)
            head.append(HeaderEntry(text, entry.code, entry.shape, offset, end))
            notes[text] = entry.note
            offset = end
        return [encode_header(head, notes), *(entry.buffer for entry in self._entries[start:stop])]

    def drop(self, count: int) -> None:
        self.nbytes -= sum(len(entry.buffer) + ENTRY_COST for entry in self._entries[:count])
        del self._entries[:count]
        self._names = {entry.name for entry in self._entries}
