"""Tensor segments: many tensors in one safetensors file, streamed to disk as they come.

A small segment is kept in memory and written whole. Once it has grown past `SPILL` bytes its file is begun
with room for the head, and every further tensor goes to the file at once, so that memory stays bounded and
the tensor's buffer is free for the next step.

An entry is called ``<step>/<reduction>/<field>/<site>``; of a phase other than ``train`` it has ``<step>@<phase>``,
and a second one of the same name in a segment has ``<step>~1``. Its note has the crc32 and whatever the dtype and
shape of the entry cannot say (see `payload`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import final

from torchtap.store.files.folder import Destination, Stream
from torchtap.store.files.layout import SegmentName
from torchtap.store.format.checksum import checksum
from torchtap.store.format.payload import TRAINING, Compressor, Payload, TensorName, payload_of
from torchtap.store.format.segment import HeaderEntry, encode_header, segment_note
from torchtap.store.record import TensorItem
from torchtap.store.write.queue import Loss

__all__ = ["ENTRY_COST", "MOST_ENTRIES", "TensorSegments"]

SPILL = 4 << 20
MOST_ENTRIES = 2048  # of a segment: to find one tensor, the head of its segment has to be read
ENTRY_COST = 16 << 10  # so many bytes of data are as much of a burden to a reader as one more entry
_SMALLEST_RESERVE = 64 << 10
_PIECE = 4 << 20  # still in the cache when it is written, after its checksum was taken


@final
class TensorSegments:
    """The tensor segments of one part, written one after another. Used by one thread."""

    def __init__(
        self,
        place: Destination,
        *,
        segment_bytes: int = 64 << 20,
        compressor: Compressor | None = None,
        appeared: Callable[[SegmentName, int], None] = lambda name, nbytes: None,
    ) -> None:
        self._place = place
        self._segment_bytes = segment_bytes
        self._compressor = compressor
        self._appeared = appeared
        self._next = 0
        self._stream: Stream | None = None
        self._reserve = 0
        self._clear()

    def _clear(self) -> None:
        self._entries: list[HeaderEntry] = []
        self._notes: dict[str, str] = {}
        self._held: list[memoryview] = []
        self._nbytes = 0
        self._head_size = 512  # estimate of the JSON's length
        self._steps: list[int] = []
        self._attempted = 0

    @property
    def pending(self) -> int:
        """How many entries are in the segment that nobody sees yet."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """How many bytes are in it."""
        return self._nbytes

    def _make_room(self, name: TensorName, payload: Payload) -> None:
        """A sparse tensor's two entries must share a segment, so room for both is made before the first."""
        if self._stream is not None and self._head_size + 2 * _room_for(name, payload) > self._reserve:
            self._commit()
            self._attempted = 1

    def add(self, step: int, item: TensorItem, phase: str = TRAINING) -> Loss | None:
        """Put one tensor into the current segment. Returns what was lost if that failed."""
        try:
            payload = payload_of(item.value)
        except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
            return Loss(f"{item.site} could not be stored: {error}", tensors=1)
        try:
            self._attempted += 1
            name = TensorName(step, item.reduction, item.field, item.site, phase=phase)
            self._make_room(name, payload)
            while (text := str(name)) in self._notes:
                name = name._replace(copy=name.copy + 1)
            if payload.indices is not None:
                self._append(str(name._replace(indices=True)), payload.indices)
            self._append(text, payload)
            if not self._steps or self._steps[-1] != step:
                self._steps.append(step)
            if self._nbytes >= self._segment_bytes or len(self._entries) >= MOST_ENTRIES:
                self._commit()
        except (OSError, ValueError) as error:
            return self._abandon(error)
        return None

    def seal(self) -> Loss | None:
        """Let the current segment appear, if there is anything in it."""
        if not self._entries:
            return None
        try:
            self._commit()
        except (OSError, ValueError) as error:
            return self._abandon(error)
        return None

    def _append(self, name: str, payload: Payload) -> None:
        facts = payload.notes
        stored, shape, buffer = payload.type, payload.shape, payload.buffer
        if not stored.native:
            facts = facts | {"dtype": stored.name}
            shape = (*shape, stored.size)
        crc = payload.checksum
        packed = self._compressor(buffer, stored.size) if self._compressor and len(buffer) else None
        code = stored.code
        if packed is not None:
            facts = facts | {"codec": "zstd", "dtype": stored.name, "stored_shape": list(payload.shape)}
            code, shape, buffer, crc = "U8", (len(packed),), memoryview(packed), None
        text = f"{self._pass_on(buffer, crc):08x}"
        note = (
            json.dumps(facts | {"crc32": text}, separators=(",", ":")) if facts else f'{{"crc32":"{text}"}}'
        )
        self._notes[name] = note
        entry = HeaderEntry(name, code, shape, self._nbytes, self._nbytes + len(buffer))
        self._entries.append(entry)
        self._nbytes += len(buffer)
        # the name twice, the note's quotes escaped, the entry's own JSON
        self._head_size += 2 * len(json.dumps(name)) + 2 * len(note) + 24 * len(shape) + 110
        if self._stream is None and self._nbytes > SPILL:
            self._spill()

    def _pass_on(self, buffer: memoryview, crc: int | None) -> int:
        """Write the bytes, or hold them for later; returns their checksum, which may be known."""
        if self._stream is None:
            self._held.append(buffer)
            return checksum(buffer) if crc is None else crc
        if crc is not None:
            self._stream.append(buffer)
            return crc
        crc = 0
        for start in range(0, len(buffer), _PIECE):
            piece = buffer[start : start + _PIECE]
            crc = checksum(piece, crc)
            self._stream.append(piece)
        return crc

    def _spill(self) -> None:
        # room for as many entries as the segment will have if it goes on like this
        more = math.ceil(self._head_size * self._segment_bytes / self._nbytes)
        self._reserve = max(_SMALLEST_RESERVE, self._head_size + 8192, min(more + 8192, 1 << 20))
        self._reserve += -self._reserve % 64
        self._stream = self._place.stream(self._reserve)
        for buffer in self._held:
            self._stream.append(buffer)
        self._held = []

    @property
    def flushes(self) -> int:
        """How many files there have been."""
        return self._next

    def _commit(self) -> None:
        name = SegmentName("tensors", self._next, self._next, min(self._steps), max(self._steps))
        metadata = {
            "torchtap": segment_note(name, self._place.part, run_id=self._place.run_id),
            **self._notes,
        }
        if self._stream is None:
            self._place.put(name.file, [encode_header(self._entries, metadata), *self._held])
        else:
            self._stream.commit(name.file, encode_header(self._entries, metadata, reserve=self._reserve))
        self._stream = None
        self._next += 1
        nbytes = self._nbytes + ENTRY_COST * len(self._entries)
        self._clear()
        self._appeared(name, nbytes)

    def _abandon(self, error: OSError | ValueError) -> Loss:
        if self._stream is not None:
            self._stream.abort()
            self._stream = None
        loss = Loss(
            f"{getattr(error, 'strerror', None) or error}", tensors=self._attempted, nbytes=self._nbytes
        )
        self._clear()
        return loss


def _room_for(name: TensorName, payload: Payload) -> int:
    """No entry's part of the head is longer than this: a character takes at most six bytes in JSON."""
    letters = len(name.site) + 3 * (len(name.reduction) + len(name.field) + len(name.phase)) + 40
    return 12 * letters + 128 * len(payload.shape) + 1024
