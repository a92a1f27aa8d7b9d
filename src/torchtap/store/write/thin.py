"""Keep a run below a limit on the disk: leave out older records in a regular way.

Each series of records, those with the same sites, keeps its latest ``window`` records. Of older ones it keeps every
second up to twice that age, every fourth up to four times, and so on; the first record always. Records near an alert,
and those with tensors, stay. Several segments become one with fewer records, which appears before they are removed.
If that fails, they stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunError
from torchtap.store.files.folder import Destination
from torchtap.store.files.layout import SegmentName
from torchtap.store.format.scalars import CLOCK, Grid, ScalarItems, encode_scalars
from torchtap.store.format.segment import Segment
from torchtap.store.write.segments import FULL

__all__ = ["Thinner", "is_kept", "kept_rows", "thinning_windows"]

_MOST_AT_ONCE = 32 << 20  # bytes of segments that are thinned into one
_NEAR_THE_LIMIT = 0.9  # of the limit: thinning begins
_AFTER_THINNING = 0.6  # of the limit
_HARDLY_THINNED = 0.9  # of the bytes: a segment that keeps more is not rewritten
_NEIGHBOURHOOD = 32  # steps
_MOST_NEIGHBOURHOODS = 16
Steps = npt.NDArray[np.int64]
Keep = Callable[[Steps, npt.NDArray[np.int64]], npt.NDArray[np.bool_]]  # of steps and (series, number)


@final
class Thinner:
    """Thin the segments of one attempt. Used by the writer's thread; ``numbers`` counts the rows of each series."""

    def __init__(self, place: Destination, limit: int, numbers: ScalarItems) -> None:
        self._place = place
        self._limit = limit
        self._numbers = numbers
        self._scalars: dict[SegmentName, int] = {}  # every scalar segment and its size, in order
        self._other_bytes = 0
        self._kept_near: list[int] = []  # steps of alerts, whose neighbourhoods stay dense
        self.with_tensors: set[int] = set()  # steps whose records stay, as their tensors do

    def keep_near(self, step: int) -> None:
        """Keep the records around a step."""
        if len(self._kept_near) < _MOST_NEIGHBOURHOODS:
            self._kept_near.append(step)

    def appeared(self, name: SegmentName, nbytes: int, replaced: Sequence[SegmentName]) -> None:
        """Note that a segment was written."""
        if name.kind != "scalars":
            self._other_bytes += nbytes
            return
        for each in replaced:
            del self._scalars[each]
        self._scalars[name] = nbytes
        self._scalars = dict(sorted(self._scalars.items(), key=lambda each: each[0].first))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all segments."""
        return self._other_bytes + sum(self._scalars.values())

    @property
    def due(self) -> bool:
        """Return True if the attempt is near its limit."""
        return self.nbytes >= _NEAR_THE_LIMIT * self._limit

    def thin(self) -> None:
        """Rewrite older segments with fewer records."""
        room = max(0, int(_AFTER_THINNING * self._limit) - self._other_bytes)
        windows = thinning_windows(self._numbers.lengths, self._numbers.row_bytes, room)
        lengths = np.array(self._numbers.lengths)

        def keep(steps: Steps, order: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
            series, number = order
            kept = is_kept(number, lengths[series] - 1, windows[series])
            for near in self._kept_near:
                kept |= np.abs(steps - near) <= _NEIGHBOURHOOD
            return kept | np.isin(steps, list(self.with_tensors))

        group: list[SegmentName] = []
        size = held = 0.0
        for name, nbytes in list(self._scalars.items()):
            share = _kept_share(self._place, name, keep)
            # One segment alone would keep its name, which readers know.
            if share < _HARDLY_THINNED or len(group) == 1:
                group.append(name)
                size, held = size + share * nbytes, held + nbytes
            full = size >= FULL["scalars"] or held >= _MOST_AT_ONCE or group[-1:] != [name]
            if len(group) > 1 and full:
                self._join(group, keep)
                group, size, held = [], 0.0, 0.0
        if len(group) > 1:
            self._join(group, keep)

    def _join(self, sources: list[SegmentName], keep: Keep) -> None:
        """Replace segments by one."""
        low, high = min(name.low for name in sources), max(name.high for name in sources)
        joined = SegmentName("scalars", sources[0].first, sources[-1].last, low, high)
        with suppress(OSError, RunError, MemoryError):
            buffers = _thinned(self._place, sources, joined, keep)
            self._place.put(joined.file, buffers, [name.file for name in sources])
            self.appeared(joined, sum(map(len, buffers)), sources)


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
        for number in range(segment.grids):
            at = segment.array(segment.entry(f"grid{number}.rows", "I64"), "<i8")
            order = segment.array(segment.entry(f"grid{number}.order", "I64"), "<i8")
            nbytes = segment.header.entries[f"grid{number}.values"].nbytes + 80 * len(at)
            kept, whole = kept + nbytes * float(keep(steps[at], order).mean()), whole + nbytes
    except (OSError, RunError, KeyError):
        return 1.0
    return kept / max(whole, 1.0)


def _thinned(
    place: Destination, sources: list[SegmentName], joined: SegmentName, keep: Keep
) -> list[bytes | memoryview]:
    """Return the bytes of one segment with the records of several that are kept."""
    phases: dict[str, int] = {}
    clocks: dict[str, list[np.ndarray]] = {name: [] for name in CLOCK}
    grids: dict[str, list[Grid]] = {}
    start = thinned = 0
    for segment in (Segment(place.folder, name) for name in sources):
        clock = {
            name: segment.array(segment.entry(f"clock.{name}", code), kind)
            for name, (code, kind) in CLOCK.items()
        }
        renumbered = [phases.setdefault(str(phase), len(phases)) for phase in segment.note["phases"]]
        clock["phase"] = np.array(renumbered, np.uint8)[clock["phase"]]
        every = [_read_grid(segment, number) for number in range(segment.grids)]
        used = np.ones(len(clock["step"]), bool)  # a record without numbers stays
        for grid in every:
            used[grid.rows] = False
        every = [
            grid if grid.order is None else grid.kept(keep(clock["step"][grid.rows], grid.order))
            for grid in every
        ]
        for grid in every:
            used[grid.rows] = True
        place_of = np.cumsum(used) - 1 + start  # records of which every number was thinned out go
        for grid in every:
            grids.setdefault(grid.note, []).append(grid._replace(rows=place_of[grid.rows]))
        for name, column in clock.items():
            clocks[name].append(column[used])
        start += int(used.sum())
        thinned += segment.note.get("thinned", 0) + int((~used).sum())
    columns = {name: np.concatenate(each) for name, each in clocks.items()}
    whole = [grid for parts in grids.values() if len((grid := Grid.joined(parts)).rows)]
    return encode_scalars(
        joined, place.part, columns, list(phases), whole, run_id=place.run_id, thinned=thinned
    )


def _read_grid(segment: Segment, number: int) -> Grid:
    mask = segment.header.entries.get(f"grid{number}.present")
    return Grid(
        segment.header.metadata[f"grid{number}"],
        segment.array(segment.entry(f"grid{number}.rows", "I64"), "<i8"),
        segment.array(segment.entry(f"grid{number}.values", "F64"), "<f8"),
        None if mask is None else segment.array(mask, "|u1") != 0,
        segment.array(segment.entry(f"grid{number}.order", "I64"), "<i8"),
    )
