"""Merge small segments that follow one another into one, so that a run keeps few files.

Sixteen segments with about the same number of flushes become one, sixteen of those one again, until a segment is large
enough; every value is written at most a few times. The merged file appears first and is synced; only then are the files
that it covers removed. At every moment, also if the process is killed, the widest segments hold everything exactly once
(see `layout.widest`). A merge takes at most about twice `_MOST_AT_ONCE` of memory. Bytes are verified on the way. If a
merge fails, its sources stay and are not tried again.

A run with a limit on the disk is thinned by merges that leave out older records. Each series of records, those with
the same sites, keeps its latest ``window`` records. Of older ones it keeps every second up to twice that age, every
fourth up to four times, and so on; the first record always. Records near an alert, and those with tensors, stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError, RunError
from torchtap.store.files.folder import Destination
from torchtap.store.files.layout import Kind, SegmentName
from torchtap.store.format.checksum import checksum
from torchtap.store.format.payload import TensorName
from torchtap.store.format.scalars import CLOCK, Grid, ScalarBuffer, encode_scalars
from torchtap.store.format.segment import HeaderEntry, Segment, encode_header, segment_note
from torchtap.store.write.tensors import ENTRY_COST

__all__ = ["Merger", "is_kept", "kept_rows", "thinning_windows"]

_TOGETHER = 16
_LARGE = {"scalars": 8 << 20, "tensors": 8 << 20, "events": 1 << 20}  # segments of this size are not merged
_MOST_AT_ONCE = 32 << 20
_NEAR_THE_LIMIT = 0.9  # of the limit: thinning begins
_AFTER_THINNING = 0.6  # of the limit
_HARDLY_THINNED = 0.9  # of the bytes: a segment that keeps more is not rewritten
_NEIGHBOURHOOD = 32  # steps
_MOST_NEIGHBOURHOODS = 16
Buffers = list[bytes | memoryview]
Steps = npt.NDArray[np.int64]
Keep = Callable[[Steps, npt.NDArray[np.int64]], npt.NDArray[np.bool_]]  # of steps and (series, number)


@final
class Merger:
    """Merge and thin the segments of one attempt when it is due. Used by the writer's thread.

    ``limit`` bounds the bytes of the attempt; None keeps every record. ``numbers`` counts the rows of each series.
    """

    def __init__(
        self, place: Destination, limit: int | None = None, numbers: ScalarBuffer | None = None
    ) -> None:
        self._place = place
        self._numbers = numbers
        self._limit = limit
        # The segments at the end of each sequence that may still be merged, with their sizes.
        self._open: dict[Kind, list[tuple[SegmentName, int]]] = {"scalars": [], "tensors": [], "events": []}
        self._scalars: dict[SegmentName, int] = {}  # every scalar segment and its size, in order
        self._other_bytes = 0
        self._kept_near: list[int] = []  # steps of alerts, whose neighbourhoods stay dense
        self.with_tensors: set[int] = set()  # steps whose records stay, as their tensors do

    def keep_near(self, step: int) -> None:
        """Keep the records around a step."""
        if len(self._kept_near) < _MOST_NEIGHBOURHOODS:
            self._kept_near.append(step)

    def appeared(self, name: SegmentName, nbytes: int) -> None:
        """Note that a segment was written."""
        if name.kind == "scalars":
            self._scalars[name] = nbytes
        else:
            self._other_bytes += nbytes
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
        self.thin()
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
        written = self._join(kind, [name for name, _ in segments[-count:]])
        del segments[-count:]
        if written is not None and written[1] < _LARGE[kind]:
            segments.append(written)
        else:
            self._open[kind] = []

    def _join(
        self, kind: Kind, sources: list[SegmentName], keep: Keep | None = None
    ) -> tuple[SegmentName, int] | None:
        """Replace segments by one. Return its name and size; None, and the sources stay, if that fails."""
        merged = SegmentName(
            kind,
            sources[0].first,
            sources[-1].last,
            min(name.low for name in sources),
            max(name.high for name in sources),
        )
        try:
            if kind == "scalars":
                buffers, entries = _join_scalars(self._place, sources, merged, keep), 0
            elif kind == "tensors":
                buffers, entries = _join_tensors(self._place, sources, merged)
            else:
                buffers, entries = _join_events(self._place, sources), 0
            self._place.put(merged.file, buffers)
            self._place.sync([merged.file])
        except (OSError, RunError, MemoryError):
            return None
        for name in sources:
            with suppress(OSError):
                self._place.remove(name.file)
        nbytes = sum(map(len, buffers)) + ENTRY_COST * entries
        if kind == "scalars":
            self._scalars = {
                **{name: size for name, size in self._scalars.items() if name.last < merged.first},
                merged: nbytes,
                **{name: size for name, size in self._scalars.items() if name.first > merged.last},
            }
        return merged, nbytes

    # --- thinning ---------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Return the bytes of all segments."""
        return self._other_bytes + sum(self._scalars.values())

    def thin(self) -> bool:
        """If the attempt is near its limit, rewrite its older segments with fewer records. Return True if it did."""
        if self._limit is None or self._numbers is None or self.nbytes < _NEAR_THE_LIMIT * self._limit:
            return False
        room = max(0, int(_AFTER_THINNING * self._limit) - self._other_bytes)
        windows = thinning_windows(self._numbers.lengths, self._numbers.row_bytes, room)
        lengths = np.array(self._numbers.lengths)

        def keep(steps: Steps, order: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
            series, number = order
            kept = is_kept(number, lengths[series] - 1, windows[series])
            for near in self._kept_near:
                kept |= np.abs(steps - near) <= _NEIGHBOURHOOD
            return kept | np.isin(steps, list(self.with_tensors))

        before = self.nbytes
        group: list[SegmentName] = []
        size = held = 0.0
        for name, nbytes in list(self._scalars.items()):
            share = _kept_share(self._place, name, keep)
            if (
                share < _HARDLY_THINNED or len(group) == 1
            ):  # one alone would keep its name, which readers know
                group.append(name)
                size, held = size + share * nbytes, held + nbytes
            full = size >= _LARGE["scalars"] or held >= _MOST_AT_ONCE or group[-1:] != [name]
            if len(group) > 1 and full:
                self._join("scalars", group, keep)
                group, size, held = [], 0.0, 0.0
        if len(group) > 1:
            self._join("scalars", group, keep)
        self._open["scalars"] = [each for each in self._open["scalars"] if each[0] in self._scalars]
        return self.nbytes < before


def thinning_windows(lengths: Sequence[int], row_bytes: Sequence[int], room: int) -> npt.NDArray[np.int64]:
    """Return how many of its latest rows each series keeps, so that all of them fit into ``room`` bytes.

    Short and narrow series keep everything. The others share the rest evenly. Each window is a power of two.
    """
    windows = np.full(len(lengths), 1 << 62, np.int64)
    by_size = sorted(range(len(lengths)), key=lambda series: lengths[series] * row_bytes[series])
    for position, series in enumerate(by_size):
        own = room // (len(by_size) - position)
        window = 1 << 62
        while window > 1 and kept_rows(lengths[series], window) * row_bytes[series] > own:
            window = min(window, 1 << lengths[series].bit_length()) >> 1
        windows[series] = window
        room -= kept_rows(lengths[series], window) * row_bytes[series]
    return windows


def kept_rows(length: int, window: int) -> int:
    """Return about how many of ``length`` rows are kept: ``window``, and half as many for each further doubling."""
    if length <= window:
        return length
    return window + int(window / 2 * np.log2(length / window)) + 1


def is_kept(
    number: npt.NDArray[np.int64], latest: npt.NDArray[np.int64], window: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return which rows are kept: row ``n`` until it is ``window`` times the largest power of two in ``n`` old."""
    stride = np.where(number == 0, 1 << 62, number & -number)
    return np.asarray((latest - number) // window < stride, np.bool_)


def _kept_share(place: Destination, name: SegmentName, keep: Keep) -> float:
    """Return the share of a segment's bytes that thinning keeps; 1 if that cannot be read."""
    try:
        segment = Segment(place.folder, name)
        steps = segment.array(segment.entry("clock.step", "I64"), "<i8")
        kept = whole = 0.0
        for number in _grids_in(segment):
            at = segment.array(segment.entry(f"grid{number}.rows", "I64"), "<i8")
            order = segment.array(segment.entry(f"grid{number}.order", "I64"), "<i8")
            nbytes = segment.header.entries[f"grid{number}.values"].nbytes + 80 * len(at)
            kept, whole = kept + nbytes * float(keep(steps[at], order).mean()), whole + nbytes
    except (OSError, RunError, KeyError):
        return 1.0
    return kept / max(whole, 1.0)


def _grids_in(segment: Segment) -> range:
    count = 0
    while f"grid{count}" in segment.header.metadata:
        count += 1
    return range(count)


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


def _join_events(place: Destination, sources: list[SegmentName]) -> Buffers:
    pieces: Buffers = []
    for name in sources:
        with place.folder.open(name.file) as file:
            pieces.append(file.read(0, file.size))
    return pieces


def _join_scalars(
    place: Destination, sources: list[SegmentName], merged: SegmentName, keep: Keep | None
) -> Buffers:
    phases: dict[str, int] = {}
    clocks: dict[str, list[np.ndarray]] = {name: [] for name in CLOCK}
    grids: dict[str, list[Grid]] = {}
    start = thinned = 0
    for segment in [Segment(place.folder, name) for name in sources]:
        for name, (code, kind) in CLOCK.items():
            clocks[name].append(segment.array(segment.entry(f"clock.{name}", code), kind))
        renumbered = [phases.setdefault(str(phase), len(phases)) for phase in segment.note["phases"]]
        clocks["phase"][-1] = np.array(renumbered, np.uint8)[clocks["phase"][-1]]
        thinned += segment.note.get("thinned", 0)
        steps = clocks["step"][-1]
        used = np.ones(len(steps), bool)  # a record without numbers stays
        every = [_read_grid(segment, number) for number in _grids_in(segment)]
        for grid in every:
            used[grid.rows] = False
        for grid in every:
            if keep is not None and grid.order is not None:
                grid = grid.kept(keep(steps[grid.rows], grid.order))
            used[grid.rows] = True
            grids.setdefault(grid.note, []).append(grid._replace(rows=grid.rows + start))
        if keep is not None and not used.all():
            # Records of which every number was thinned out go; rows of grids are numbered anew.
            place_of = np.cumsum(used) - 1
            for column in clocks.values():
                column[-1] = column[-1][used]
            for parts in grids.values():
                own = parts[-1].rows >= start
                if own.any():
                    parts[-1] = parts[-1]._replace(rows=place_of[parts[-1].rows - start] + start)
            thinned += int((~used).sum())
        start += int(used.sum()) if keep is not None else len(used)
    clock = {name: np.concatenate(columns) for name, columns in clocks.items()}
    whole = [joined for parts in grids.values() if len((joined := Grid.joined(parts)).rows)]
    return encode_scalars(
        merged, place.part, clock, list(phases), whole, run_id=place.run_id, thinned=thinned
    )


def _read_grid(segment: Segment, number: int) -> Grid:
    rows = segment.array(segment.entry(f"grid{number}.rows", "I64"), "<i8")
    values = segment.array(segment.entry(f"grid{number}.values", "F64"), "<f8")
    mask = segment.header.entries.get(f"grid{number}.present")
    order = segment.header.entries.get(f"grid{number}.order")
    return Grid(
        segment.header.metadata[f"grid{number}"],
        rows,
        values,
        None if mask is None else segment.array(mask, "|u1") != 0,
        None if order is None else segment.array(order, "<i8"),
    )


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
