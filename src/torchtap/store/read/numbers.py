"""The numbers of one attempt: the clock of its records, the grids of its scalar segments, and reading them as a block.

A block is one statistic of some sites over some records. Only the bytes of these sites are read. Series, matrices and
tables are all made of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError
from torchtap.sanitize import shortened
from torchtap.store.format.checksum import load_json
from torchtap.store.format.scalars import CLOCK
from torchtap.store.format.segment import HeaderEntry, Segment

__all__ = ["Axes", "AxesCache", "Block", "ClockRows", "StoredGrid", "join_clocks", "read_clock", "read_grids"]

Array = TypeVar("Array", bound=np.ndarray)
_LONGEST_PHASE = 64
# Columns that a later version of the format added, and the value to use in an older run.
_LATER = {"passes": 1, "skipped": 0}


# --- the clock ------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, eq=False)
class ClockRows:
    """The clock of some records, as columns."""

    step: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]
    batch: npt.NDArray[np.int64]
    phase: npt.NDArray[np.str_]
    time: npt.NDArray[np.float64]
    passes: npt.NDArray[np.int64]
    skipped: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.step)

    def table(self, rows: npt.NDArray[np.int64]) -> np.recarray:
        """Return these rows as one array with a field for each column."""
        columns = {name: getattr(self, name)[rows] for name in CLOCK}
        table = np.empty(len(rows), [(name, column.dtype) for name, column in columns.items()])
        for name, column in columns.items():
            table[name] = column
        return table.view(np.recarray)


def read_clock(segment: Segment) -> ClockRows:
    """Read the clock columns of a scalar segment."""
    rows = segment.entry("clock.step", "I64").shape
    if len(rows) != 1:
        raise RunCorruptError("its clock is not a column")
    columns: dict[str, np.ndarray] = {
        name: segment.array(segment.entry(f"clock.{name}", code, rows), kind)
        for name, (code, kind) in CLOCK.items()
        if name not in _LATER or f"clock.{name}" in segment.header.entries
    }
    for name, unknown in _LATER.items():
        columns.setdefault(name, np.full(rows, unknown))
    phases = segment.note.get("phases")
    if not isinstance(phases, list) or not all(isinstance(phase, str) for phase in phases):
        raise RunCorruptError("its phases are not names")
    if rows[0] and int(columns["phase"].max()) >= len(phases):
        raise RunCorruptError("its clock has a phase without a name")
    for name in ("epoch", "batch"):
        columns[name] = np.where(columns[name] < 0, -1, columns[name])
    # An array of texts has room for the longest in every row, so names are shortened first.
    names = [shortened(phase, _LONGEST_PHASE) for phase in phases]
    columns["phase"] = np.asarray(names or [""], dtype=np.str_)[columns["phase"]]
    columns["skipped"] = columns["skipped"] != 0
    return ClockRows(**columns)


def join_clocks(clocks: Sequence[ClockRows]) -> ClockRows:
    """Concatenate clocks."""
    if not clocks:
        whole, names = np.zeros(0, np.int64), np.zeros(0, np.str_)
        return ClockRows(whole, whole, whole, names, np.zeros(0), whole, np.zeros(0, bool))
    return ClockRows(*(np.concatenate([getattr(clock, name) for clock in clocks]) for name in CLOCK))


# --- grids ----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, eq=False)
class Axes:
    """The sites and statistics of a grid, by name and by position."""

    sites: tuple[str, ...]
    statistics: tuple[str, ...]
    site_index: dict[str, int]
    statistic_index: dict[str, int]


AxesCache = dict[str, Axes]  # by the note's text: most segments of a run have the same grids


def _axes(note: str | None, cache: AxesCache) -> Axes:
    if note is None:
        raise RunCorruptError("a grid does not name its sites and statistics")
    axes = cache.get(note)
    if axes is None:
        match load_json(note):
            case {"sites": list(sites), "statistics": list(statistics)}:
                pass
            case _:
                raise RunCorruptError("a grid's sites or statistics are missing")
        if not all(isinstance(name, str) for name in (*sites, *statistics)):
            raise RunCorruptError("a grid's sites or statistics are not names")
        axes = cache[note] = Axes(
            tuple(sites),
            tuple(statistics),
            {name: index for index, name in enumerate(sites)},
            {name: index for index, name in enumerate(statistics)},
        )
    return axes


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredGrid:
    """One grid of one segment. ``rows`` are positions in the segment's clock.

    Reading damaged numbers raises an error that names the file. With ``lenient`` they are NaN instead.
    """

    segment: Segment
    axes: Axes
    rows: npt.NDArray[np.int64]
    values: HeaderEntry
    present: HeaderEntry | None

    def rectangle(
        self, sites: Sequence[int], statistic: int, *, lenient: bool = False
    ) -> npt.NDArray[np.float64]:
        """Read one statistic of some sites: (sites, rows)."""
        shape = len(sites), len(self.rows)
        if not all(shape):
            return np.zeros(shape)
        return self._taken(lambda: self._rectangle(sites, statistic), np.full(shape, np.nan), lenient)

    def _rectangle(self, sites: Sequence[int], statistic: int) -> npt.NDArray[np.float64]:
        width = len(self.rows) * 8
        first, last = min(sites), max(sites)
        start = statistic * len(self.axes.sites) * width
        if len(sites) * 4 > last - first:  # nearly all of a range: one read
            (whole,) = self.segment.read_ranges(
                self.values, [(start + first * width, start + (last + 1) * width)]
            )
            span: npt.NDArray[np.float64] = np.frombuffer(whole, "<f8").reshape(-1, len(self.rows))
            if list(sites) == list(range(first, last + 1)):
                return span
            chosen: npt.NDArray[np.float64] = span[np.asarray(sites) - first]
            return chosen
        starts = [start + site * width for site in sites]
        pieces = self.segment.read_ranges(self.values, [(at, at + width) for at in starts])
        return np.stack([np.frombuffer(piece, "<f8") for piece in pieces])

    def presence(self, sites: Sequence[int], *, lenient: bool = False) -> npt.NDArray[np.bool_]:
        """Read which of these sites have a value: (sites, rows). Nothing is present where that is damaged."""
        shape = len(sites), len(self.rows)
        if self.present is None:
            return np.ones(shape, bool)
        entry, width = self.present, len(self.rows)

        def read() -> npt.NDArray[np.bool_]:
            if len(sites) == len(self.axes.sites):
                return np.asarray(self.segment.array(entry, "|u1") != 0)
            pieces = self.segment.read_ranges(entry, [(site * width, (site + 1) * width) for site in sites])
            return np.stack([np.frombuffer(piece, np.uint8) != 0 for piece in pieces])

        return self._taken(read, np.zeros(shape, bool), lenient)

    def _taken(self, read: Callable[[], Array], instead: Array, lenient: bool) -> Array:
        try:
            return read()
        except RunCorruptError as damage:
            if lenient:
                return instead
            raise RunCorruptError(
                f"{self.segment.file}: {damage}; partial=True gives NaN for its steps, and everything else"
            ) from damage


def read_grids(segment: Segment, clock_rows: int, cache: AxesCache) -> list[StoredGrid]:
    """Return the grids of a scalar segment, checked. Values are not read."""
    grids = []
    number = 0
    while f"grid{number}.values" in segment.header.entries:
        axes = _axes(segment.header.metadata.get(f"grid{number}"), cache)
        rows = segment.array(segment.entry(f"grid{number}.rows", "I64"), "<i8")
        if rows.ndim != 1 or (len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < clock_rows)):
            raise RunCorruptError(f"the rows of grid {number} are not rows of the clock")
        sites = len(axes.sites)
        values = segment.entry(f"grid{number}.values", "F64", (len(axes.statistics), sites, len(rows)))
        present = None
        if f"grid{number}.present" in segment.header.entries:
            present = segment.entry(f"grid{number}.present", "BOOL", (sites, len(rows)))
        grids.append(StoredGrid(segment, axes, rows, values, present))
        number += 1
    return grids


# --- blocks ---------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """One statistic of some sites over records, ascending by step: ``values[site, record]`` where ``there``."""

    steps: npt.NDArray[np.int64]  # a step that was recorded twice in one phase is here twice
    values: npt.NDArray[np.float64]
    there: npt.NDArray[np.bool_]

    def kept(self, keep: npt.NDArray[np.bool_]) -> Block:
        """Return the block with these columns alone."""
        return self if keep.all() else Block(self.steps[keep], self.values[:, keep], self.there[:, keep])

    def once(self) -> Block:
        """Return the block with every step once: of several records the last one that has a value."""
        if not np.any(np.diff(self.steps) == 0):
            return self
        steps, at = np.unique(self.steps, return_inverse=True)
        found = Block.empty(len(self.values), steps)
        for column, target in enumerate(at.tolist()):
            here = self.there[:, column]
            found.values[here, target] = self.values[here, column]
            found.there[here, target] = True
        return found

    def at(self, steps: npt.NDArray[np.int64]) -> Block:
        """Return the block over these ascending steps, each once; absent where it has none of them."""
        own = self.once()
        if np.array_equal(own.steps, steps):
            return own
        found = Block.empty(len(own.values), steps)
        _, source, target = np.intersect1d(own.steps, steps, assume_unique=True, return_indices=True)
        found.values[:, target], found.there[:, target] = own.values[:, source], own.there[:, source]
        return found

    @classmethod
    def empty(cls, sites: int, steps: npt.NDArray[np.int64]) -> Block:
        """Return a block without a value."""
        shape = sites, len(steps)
        return cls(steps, np.full(shape, np.nan), np.zeros(shape, bool))

    @classmethod
    def joined(cls, sites: int, blocks: Sequence[Block]) -> Block:
        """Return blocks of the same sites as one, ascending by step."""
        if len(blocks) == 1:
            return blocks[0]
        if not blocks:
            return cls.empty(sites, np.zeros(0, np.int64))
        steps = np.concatenate([block.steps for block in blocks])
        order = np.argsort(steps, kind="stable")
        values = np.concatenate([block.values for block in blocks], axis=1)[:, order]
        return cls(steps[order], values, np.concatenate([block.there for block in blocks], axis=1)[:, order])

    @classmethod
    def stacked(cls, sites: int, blocks: Sequence[tuple[Sequence[int], Block]]) -> Block:
        """Return blocks of different sites as one; each comes with the rows of its sites."""
        steps = np.unique(np.concatenate([np.zeros(0, np.int64), *(block.steps for _, block in blocks)]))
        whole = cls.empty(sites, steps)
        for rows, block in blocks:
            own = block.at(steps)
            whole.values[list(rows)], whole.there[list(rows)] = own.values, own.there
        return whole

    @classmethod
    def of_grids(
        cls,
        grids: Iterable[tuple[int, StoredGrid]],
        clock: ClockRows,
        rows: npt.NDArray[np.int64],
        statistic: str,
        sites: Sequence[str],
        *,
        lenient: bool,
    ) -> Block:
        """Read a block. ``rows`` are the records wanted; grids come with the first row of their segment.

        If two grids of one record have the same number, the first one counts.
        """
        wanted = np.zeros(len(clock), bool)
        wanted[rows] = True
        position = {site: index for index, site in enumerate(sites)}
        shared: dict[int, tuple[list[int], list[int]]] = {}  # by axes: thousands of grids have the same
        used: list[tuple[StoredGrid, npt.NDArray[np.int64]]] = []
        for start, grid in grids:
            at = grid.rows + start
            if statistic not in grid.axes.statistic_index or not wanted[at].any():
                continue
            if id(grid.axes) not in shared:
                if len(sites) < len(grid.axes.sites):
                    own = {
                        site: index for site in sites if (index := grid.axes.site_index.get(site)) is not None
                    }
                else:
                    own = {site: index for site, index in grid.axes.site_index.items() if site in position}
                shared[id(grid.axes)] = list(own.values()), [position[site] for site in own]
            if shared[id(grid.axes)][0]:
                used.append((grid, at))
        # Room for the records that have these sites: a thinned run has a million records of other ones.
        held = np.zeros(len(clock), bool)
        for _, at in used:
            held[at] = True
        rows = rows[held[rows]]
        rows = rows[np.argsort(clock.step[rows], kind="stable")]
        found = cls.empty(len(sites), clock.step[rows])
        place = np.full(len(clock), -1, np.int64)
        place[rows] = np.arange(len(rows))
        for grid, at in used:
            sources, targets = shared[id(grid.axes)]
            column = grid.axes.statistic_index[statistic]
            found.fill(grid, sources, column, targets, place[at], place[at] >= 0, lenient)
        return found.filled()

    def filled(self) -> Block:
        """Return the block without the records that have no value of any site."""
        return self.kept(np.asarray(self.there.any(axis=0)))

    def fill(
        self,
        grid: StoredGrid,
        sources: list[int],
        column: int,
        targets: list[int],
        target: npt.NDArray[np.int64],
        keep: npt.NDArray[np.bool_],
        lenient: bool,
    ) -> None:
        """Read one grid into the block: ``sources`` of its sites to these rows, records to ``target`` columns."""
        values = grid.rectangle(sources, column, lenient=lenient)
        there = grid.presence(sources, lenient=lenient) if grid.present is not None else None
        if not keep.all():
            values, target = values[:, keep], target[keep]
            there = there[:, keep] if there is not None else None
        at = _corner(targets, target)
        taken = self.there[at]
        if there is None and not taken.any():
            self.values[at] = values
            self.there[at] = True
        else:
            new = ~taken if there is None else there & ~taken
            self.values[at] = np.where(new, values, self.values[at])
            self.there[at] = taken | new


def _corner(rows: list[int], columns: npt.NDArray[np.int64]) -> tuple[slice | npt.NDArray[np.int64], ...]:
    """Return an index for these rows and columns; slices, which are many times faster, if both are contiguous."""
    if rows == list(range(rows[0], rows[0] + len(rows))) and bool(np.all(np.diff(columns) == 1)):
        return slice(rows[0], rows[-1] + 1), slice(int(columns[0]), int(columns[-1]) + 1)
    return np.ix_(np.asarray(rows), columns)
