"""Several small tensor segments written as one: the same bytes, verified on the way, under one head."""

from __future__ import annotations

from torchtap.errors import RunCorruptError
from torchtap.store.files.destination import Destination
from torchtap.store.files.layout import SegmentName
from torchtap.store.format.checksum import ChunkedChecksum, parse_checksums
from torchtap.store.format.header import HeaderEntry, encode_header
from torchtap.store.format.notes import segment_note
from torchtap.store.format.segment import Segment
from torchtap.store.write.tensors import ENTRY_COST, TensorName

__all__ = ["merge_tensors"]

_BUFFER = 1 << 20


def merge_tensors(place: Destination, sources: list[SegmentName], merged: SegmentName) -> int:
    """Write the segment that covers ``sources``. Returns its weight, as `Merger` counts it."""
    segments = [Segment(place.folder, name) for name in sources]
    entries: list[HeaderEntry] = []
    notes = {"torchtap": segment_note(merged, place.part)}
    offset = 0
    for segment in segments:
        renamed: dict[TensorName, int] = {}
        for entry in segment.header.entries.values():
            name = _free_name(entry.name, notes, renamed)
            entries.append(HeaderEntry(name, entry.code, entry.shape, offset, offset + entry.nbytes))
            notes[name] = segment.header.metadata.get(entry.name, "{}")
            offset += entry.nbytes
    head = encode_header(entries, notes)
    stream = place.stream(len(head))
    try:
        for segment in segments:
            with segment.open() as file:
                for entry in segment.header.entries.values():
                    chunk, expected = parse_checksums(segment.header.facts(entry.name), entry.nbytes)
                    checksum = ChunkedChecksum(chunk)
                    position = segment.header.data_start + entry.start
                    for start in range(0, entry.nbytes, _BUFFER):
                        size = min(_BUFFER, entry.nbytes - start)
                        piece = memoryview(file.read(position + start, size))
                        checksum.update(piece)
                        stream.append(piece)
                    if (checksum.result() or ["00000000"]) != expected:
                        raise RunCorruptError(f"{segment.name.file}: the bytes of {entry.name} have changed")
        stream.commit(merged.file, head)
    except BaseException:
        stream.abort()
        raise
    return offset + ENTRY_COST * len(entries)


def _free_name(text: str, taken: dict[str, str], renamed: dict[TensorName, int]) -> str:
    """A name that no earlier segment has; both entries of a sparse tensor get the same number."""
    name = TensorName.parse(text)
    if name is None:
        raise RunCorruptError(f"the entry {text[:80]!r} does not name a step and a site")
    key = name._replace(indices=False)
    if key not in renamed:
        copy = name.copy
        while (
            str(name._replace(copy=copy, indices=False)) in taken
            or str(name._replace(copy=copy, indices=True)) in taken
        ):
            copy += 1
        renamed[key] = copy
    return str(name._replace(copy=renamed[key]))
