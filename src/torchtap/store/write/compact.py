"""Merge small segments that follow one another into one, so that a run keeps few files.

Sixteen segments with about the same number of flushes become one, sixteen of those one again, until a segment is large
enough; every value is written at most a few times. The merged file appears first and is synced; only then are the files
that it covers removed. At every moment, also if the process is killed, the widest segments hold everything exactly once
(see `layout.widest`). A merge takes at most about twice `_MOST_AT_ONCE` of memory. Bytes are verified on the way. If a
merge fails, its sources stay and are not tried again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import final

import numpy as np

from torchtap.errors import RunCorruptError, RunError
from torchtap.store.files.folder import Destination
from torchtap.store.files.layout import Kind, SegmentName
from torchtap.store.format.checksum import checksum
from torchtap.store.format.payload import TensorName
from torchtap.store.format.scalars import CLOCK, Grid, encode_scalars
from torchtap.store.format.segment import HeaderEntry, Segment, encode_header, segment_note
from torchtap.store.write.tensors import ENTRY_COST

__all__ = ["Merger"]

_TOGETHER = 16
_LARGE = {"scalars": 8 << 20, "tensors": 8 << 20, "events": 1 << 20}  # segments of this size are not merged
_MOST_AT_ONCE = 32 << 20
Buffers = list[bytes | memoryview]


@final
class Merger:
    """Merge the segments of one attempt when it is due. Used by the writer's thread."""

    def __init__(self, place: Destination) -> None:
        self._place = place
        # The segments at the end of each sequence that may still be merged, with their sizes.
        self._open: dict[Kind, list[tuple[SegmentName, int]]] = {"scalars": [], "tensors": [], "events": []}

    def appeared(self, name: SegmentName, nbytes: int) -> None:
        """Note that a segment was written."""
        if nbytes >= _LARGE[name.kind]:
            self._close_group(name.kind)  # nothing is merged across it
        else:
            self._open[name.kind].append((name, nbytes))

    def merge_some(self) -> bool:
        """Do one merge that is due. Return False if none is."""
        for kind, segments in self._open.items():
            last = segments[-_TOGETHER:]
            if len(last) == _TOGETHER and _tier(last[0][0]) == _tier(last[-1][0]):
                self._merge(kind, _fitting(last))
                return True
        return False

    def finish(self) -> None:
        """Merge the small segments at the end of each sequence, when the run is closed."""
        for kind in self._open:
            self._close_group(kind)

    def _close_group(self, kind: Kind) -> None:
        self._merge(kind, _fitting(self._open[kind]))
        self._open[kind] = []

    def _merge(self, kind: Kind, count: int) -> None:
        """Merge the last ``count`` segments of a kind."""
        segments = self._open[kind]
        if count < 2:
            self._open[kind] = []
            return
        sources = [name for name, _ in segments[-count:]]
        merged = SegmentName(
            kind,
            sources[0].first,
            sources[-1].last,
            min(name.low for name in sources),
            max(name.high for name in sources),
        )
        join: dict[Kind, Callable[[Destination, list[SegmentName], SegmentName], tuple[Buffers, int]]] = {
            "scalars": _join_scalars,
            "tensors": _join_tensors,
            "events": _join_events,
        }
        try:
            buffers, entries = join[kind](self._place, sources, merged)
            self._place.put(merged.file, buffers)
            self._place.sync([merged.file])
        except (OSError, RunError, MemoryError):
            self._open[kind] = []
            return
        for name in sources:
            with suppress(OSError):
                self._place.remove(name.file)
        del segments[-count:]
        nbytes = sum(map(len, buffers)) + ENTRY_COST * entries
        if nbytes < _LARGE[kind]:
            segments.append((merged, nbytes))
        else:
            self._open[kind] = []


def _fitting(segments: list[tuple[SegmentName, int]]) -> int:
    """Return how many of the last segments fit into one merge."""
    count = total = 0
    for _, nbytes in reversed(segments):
        if total + nbytes > _MOST_AT_ONCE:
            break
        count, total = count + 1, total + nbytes
    return count


def _tier(name: SegmentName) -> int:
    """Return how often the contents of a segment were merged, from the number of its flushes."""
    tier, span = 0, name.last - name.first + 1
    while span >= _TOGETHER:
        tier, span = tier + 1, span // _TOGETHER
    return tier


def _join_events(place: Destination, sources: list[SegmentName], merged: SegmentName) -> tuple[Buffers, int]:
    pieces: Buffers = []
    for name in sources:
        with place.folder.open(name.file) as file:
            pieces.append(file.read(0, file.size))
    return pieces, 0


def _join_scalars(place: Destination, sources: list[SegmentName], merged: SegmentName) -> tuple[Buffers, int]:
    phases: dict[str, int] = {}
    clocks: dict[str, list[np.ndarray]] = {name: [] for name in CLOCK}
    grids: dict[str, list[Grid]] = {}
    start = 0
    for segment in [Segment(place.folder, name) for name in sources]:
        for name, (code, kind) in CLOCK.items():
            clocks[name].append(segment.array(segment.entry(f"clock.{name}", code), kind))
        renumbered = [phases.setdefault(str(phase), len(phases)) for phase in segment.note["phases"]]
        clocks["phase"][-1] = np.array(renumbered, np.uint8)[clocks["phase"][-1]]
        number = 0
        while (note := segment.header.metadata.get(f"grid{number}")) is not None:
            rows = segment.array(segment.entry(f"grid{number}.rows", "I64"), "<i8") + start
            values = segment.array(segment.entry(f"grid{number}.values", "F64"), "<f8")
            mask = segment.header.entries.get(f"grid{number}.present")
            present = None if mask is None else segment.array(mask, "|u1") != 0
            grids.setdefault(note, []).append(Grid(note, rows, values, present))
            number += 1
        start += len(clocks["step"][-1])
    clock = {name: np.concatenate(columns) for name, columns in clocks.items()}
    whole = [Grid.joined(parts) for parts in grids.values()]
    return encode_scalars(merged, place.part, clock, list(phases), whole, run_id=place.run_id), 0


def _join_tensors(place: Destination, sources: list[SegmentName], merged: SegmentName) -> tuple[Buffers, int]:
    entries: list[HeaderEntry] = []
    notes = {"torchtap": segment_note(merged, place.part, run_id=place.run_id)}
    data: Buffers = []
    offset = 0
    for segment in [Segment(place.folder, name) for name in sources]:
        renamed: dict[TensorName, int] = {}
        for entry in segment.header.entries.values():
            name = _free_name(entry.name, notes, renamed)
            content = segment.read(entry)
            entries.append(HeaderEntry(name, entry.code, entry.shape, offset, offset + entry.nbytes))
            # One checksum for the whole entry, as the writer of tensors makes it.
            facts = {**segment.header.facts(entry.name), "crc32": f"{checksum(content):08x}"}
            facts.pop("chunk", None)
            notes[name] = json.dumps(facts, separators=(",", ":"))
            data.append(memoryview(content))
            offset += entry.nbytes
    return [encode_header(entries, notes), *data], len(entries)


def _free_name(text: str, taken: dict[str, str], renamed: dict[TensorName, int]) -> str:
    """Return a name that no earlier segment has; both entries of a sparse tensor get the same number."""
    name = TensorName.parse(text)
    if name is None:
        raise RunCorruptError(f"the entry {text[:80]!r} does not name a step and a site")
    key = name._replace(indices=False)
    if key not in renamed:
        copy = name.copy
        while any(str(name._replace(copy=copy, indices=each)) in taken for each in (False, True)):
            copy += 1
        renamed[key] = copy
    return str(name._replace(copy=renamed[key]))
