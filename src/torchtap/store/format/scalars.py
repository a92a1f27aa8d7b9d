"""Scalar segments: the clock and the numbers of some steps, laid out so that each series is contiguous.

Entries: ``clock.step/epoch/batch/phase/time/passes/skipped`` with one row for each record, and for each grid of
sites by statistics ``gridN.values`` (statistics, sites, rows), ``gridN.rows`` (rows of the clock) and, only if a site
was absent, ``gridN.present`` (sites, rows). A step exists once its row of the clock does: its tensors appear before.

A run with a limit on the disk also has ``gridN.order`` (2, rows): the series that a row belongs to, and its number in
that series. Rows of one grid with the same sites present are one series. `thin` thins each series by these numbers.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from torchtap.store.files.folder import Destination
from torchtap.store.files.layout import Kind, PartOf, SegmentName
from torchtap.store.format.checksum import CHUNK, checksum, checksums
from torchtap.store.format.segment import HeaderEntry, encode_header, segment_note
from torchtap.store.record import ScalarBlock, StepRecord

__all__ = ["CLOCK", "NO_NUMBER", "Grid", "ScalarItems", "encode_scalars", "grid_note"]

CLOCK: dict[str, tuple[str, str]] = {
    "step": ("I64", "<i8"),
    "epoch": ("I64", "<i8"),
    "batch": ("I64", "<i8"),
    "phase": ("U8", "|u1"),
    "time": ("F64", "<f8"),
    "passes": ("I64", "<i8"),
    "skipped": ("U8", "|u1"),
}
NO_NUMBER = -(2**63)  # an epoch or batch that was not set
_MOST_SERIES = 256


@final
@dataclass(slots=True, eq=False)
class _GridRows:
    """The rows of one grid that wait to be written."""

    sites: tuple[str, ...]
    statistics: tuple[str, ...]
    rows: list[int] = field(default_factory=list)
    values: list[npt.NDArray[np.float64]] = field(default_factory=list)
    present: list[npt.NDArray[np.bool_] | None] = field(default_factory=list)
    order: list[tuple[int, int]] = field(default_factory=list)
    note: str = ""  # the axes as JSON, made once


def grid_note(sites: Sequence[str], statistics: Sequence[str]) -> str:
    """Return the note that names a grid's axes."""
    return json.dumps({"sites": sites, "statistics": statistics}, separators=(",", ":"))


@final
class ScalarItems:
    """The clocks and numbers of records until they are in a full file (`write.segments`). Used by one thread."""

    kind: Kind = "scalars"

    def __init__(self, *, ordered: bool = False) -> None:
        self._known: dict[tuple[int, int], _GridRows] = {}  # by identity, which holds from step to step
        self._ordered = ordered
        self._series: dict[object, int] = {}
        self.lengths: list[int] = []  # of each series: its rows so far
        self.row_bytes: list[int] = []  # of each series
        self.drop(0)

    def drop(self, count: int) -> None:
        """Release all records, which is what ``count`` says."""
        self._clock: list[tuple[int, int, int, int, float, int, int]] = []
        self._phases: dict[str, int] = {}
        self._grids: dict[tuple[tuple[str, ...], tuple[str, ...]], _GridRows] = {}
        self.nbytes = 0
        if len(self._known) > 256:
            self._known.clear()
        for grid in self._known.values():
            grid.rows, grid.values, grid.present, grid.order = [], [], [], []

    @property
    def count(self) -> int:
        """Return the number of records."""
        return len(self._clock)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the smallest and the largest step of some records."""
        steps = [row[0] for row in self._clock[start:stop]]
        return min(steps), max(steps)

    def add(self, record: StepRecord) -> None:
        """Add the clock and the numbers of one record."""
        for block in record.scalars:
            if block.values.shape != (len(block.sites), len(block.statistics)):
                raise ValueError(
                    f"a block of {len(block.sites)} sites by {len(block.statistics)} statistics has "
                    f"values of shape {block.values.shape}"
                )
        row = len(self._clock)
        phase = self._phases.setdefault(record.phase, len(self._phases))
        epoch = NO_NUMBER if record.epoch is None else record.epoch
        batch = NO_NUMBER if record.batch is None else record.batch
        self._clock.append(
            (record.step, epoch, batch, phase, record.time, record.passes, int(record.skipped))
        )
        self.nbytes += 50
        for block in record.scalars:
            grid = self._grid(block)
            grid.rows.append(row)
            grid.values.append(block.values)
            grid.present.append(block.present)
            self.nbytes += block.values.nbytes + 8
            if self._ordered:
                grid.order.append(self._number(block))

    def _number(self, block: ScalarBlock) -> tuple[int, int]:
        """Return the series of a row and its number in it."""
        pattern = b"" if block.present is None else np.packbits(block.present).tobytes()
        key = block.sites, block.statistics, pattern
        if key not in self._series and len(self._series) >= _MOST_SERIES:
            key = block.sites, block.statistics, b"other"  # presence at random, as of experts
        series = self._series.setdefault(key, len(self._series))
        if series == len(self.lengths):
            self.lengths.append(0)
            self.row_bytes.append(block.values.nbytes + 80)  # and the clock
        self.lengths[series] += 1
        return series, self.lengths[series] - 1

    def _grid(self, block: ScalarBlock) -> _GridRows:
        identity = (id(block.sites), id(block.statistics))
        grid = self._known.get(identity)
        if grid is None or grid.sites is not block.sites or grid.statistics is not block.statistics:
            grid = self._known[identity] = _GridRows(block.sites, block.statistics)
        if not grid.rows:
            # equal axes in other tuple objects share one grid of the segment
            grid = self._grids.setdefault((block.sites, block.statistics), grid)
        return grid

    def encode(
        self, name: SegmentName, place: Destination, start: int, stop: int
    ) -> list[bytes | memoryview]:
        """Return the bytes of the segment of this name, with some records."""
        columns = np.array(self._clock[start:stop], dtype=[(name, kind) for name, (_, kind) in CLOCK.items()])
        clock = {name: np.ascontiguousarray(columns[name]) for name in CLOCK}
        grids = []
        for grid in self._grids.values():
            own = slice(bisect_left(grid.rows, start), bisect_left(grid.rows, stop))
            rows = np.asarray(grid.rows[own], "<i8") - start
            if not len(rows):
                continue
            values = np.stack([block.T for block in grid.values[own]], axis=-1).astype("<f8", copy=False)
            present = None
            if any(mask is not None for mask in grid.present[own]):
                everyone = np.ones(len(grid.sites), bool)
                masks = [everyone if mask is None else mask for mask in grid.present[own]]
                present = np.stack(masks, axis=-1)
            grid.note = grid.note or grid_note(grid.sites, grid.statistics)
            order = np.asarray(grid.order[own], "<i8").T if self._ordered else None
            grids.append(Grid(grid.note, rows, values, present, order))
        return encode_scalars(name, place.part, clock, list(self._phases), grids, run_id=place.run_id)


class Grid(NamedTuple):
    """One grid of a segment: its axes as JSON, rows of the clock, values (statistics, sites, rows), presence."""

    note: str
    rows: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    present: npt.NDArray[np.bool_] | None = None  # (sites, rows); None if every site has a value
    order: npt.NDArray[np.int64] | None = None  # (2, rows): series and number, in a run that is thinned

    def kept(self, keep: npt.NDArray[np.bool_]) -> Grid:
        """Return the grid with these rows alone."""
        present = None if self.present is None else self.present[:, keep]
        order = None if self.order is None else self.order[:, keep]
        return Grid(self.note, self.rows[keep], self.values[:, :, keep], present, order)

    @classmethod
    def joined(cls, grids: Sequence[Grid]) -> Grid:
        """Return grids with the same axes as one."""
        present = None
        if any(grid.present is not None for grid in grids):
            present = np.concatenate(
                [
                    np.ones(grid.values.shape[1:], bool) if grid.present is None else grid.present
                    for grid in grids
                ],
                axis=1,
            )
        return cls(
            grids[0].note,
            np.concatenate([grid.rows for grid in grids]),
            np.concatenate([grid.values for grid in grids], axis=2),
            present,
            None
            if grids[0].order is None
            else np.concatenate([g.order for g in grids if g.order is not None], axis=1),
        )


def encode_scalars(
    name: SegmentName,
    part: PartOf,
    clock: dict[str, np.ndarray],
    phases: list[str],
    grids: Iterable[Grid],
    *,
    run_id: str | None = None,
    thinned: int = 0,
) -> list[bytes | memoryview]:
    """Return a scalar segment as buffers: the head, then each array. ``thinned`` records were left out of it."""
    arrays: list[tuple[str, str, np.ndarray]] = [
        (f"clock.{column}", CLOCK[column][0], clock[column]) for column in CLOCK
    ]
    facts: dict[str, Any] = {"phases": phases, "thinned": thinned} if thinned else {"phases": phases}
    metadata: dict[str, str] = {"torchtap": segment_note(name, part, run_id=run_id, **facts)}
    for number, (note, rows, values, present, order) in enumerate(grids):
        metadata[f"grid{number}"] = note
        arrays.append((f"grid{number}.rows", "I64", rows))
        if order is not None:
            arrays.append((f"grid{number}.order", "I64", np.ascontiguousarray(order)))
        if present is not None:
            arrays.append((f"grid{number}.present", "BOOL", np.ascontiguousarray(present)))
        arrays.append((f"grid{number}.values", "F64", np.ascontiguousarray(values)))
    entries: list[HeaderEntry] = []
    buffers: list[bytes | memoryview] = []
    offset = 0
    arrays.sort(key=lambda array: array[1] in ("U8", "BOOL"))  # bytes last, so that all numbers lie aligned
    for entry, code, array in arrays:
        buffer = array.reshape(-1).view(np.uint8).data
        entries.append(HeaderEntry(entry, code, array.shape, offset, offset + len(buffer)))
        if len(buffer) > CHUNK:
            facts = {"crc32": checksums(buffer), "chunk": CHUNK}
        else:
            facts = {"crc32": f"{checksum(buffer):08x}"}
        metadata[entry] = json.dumps(facts, separators=(",", ":"))
        buffers.append(buffer)
        offset += len(buffer)
    return [encode_header(entries, metadata), *buffers]
