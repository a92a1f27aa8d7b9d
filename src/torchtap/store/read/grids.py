"""Grids of numbers in scalar segments: finding a series in them and reading only its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError
from torchtap.store.format.header import HeaderEntry
from torchtap.store.format.seal import load_json
from torchtap.store.format.segment import Segment

__all__ = ["Axes", "AxesCache", "StoredGrid", "read_grids"]

Array = TypeVar("Array", bound=np.ndarray)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Axes:
    """A grid's sites and statistics, by name and by position."""

    sites: tuple[str, ...]
    statistics: tuple[str, ...]
    site_index: dict[str, int]
    statistic_index: dict[str, int]


AxesCache = dict[str, Axes]  # by the note's text: most segments of a run have the same grids


def _axes(note: str | None, cache: AxesCache) -> Axes:
    if note is None:
        raise RunCorruptError("a grid does not say what is in it")
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

    Numbers that are damaged are an error that names the file; NaN where the caller wants what there is (``lenient``).
    """

    segment: Segment
    axes: Axes
    rows: npt.NDArray[np.int64]
    values: HeaderEntry
    present: HeaderEntry | None
    lenient: bool = False

    def series(self, site: str, statistic: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Rows of the clock and the values there; only those at which the site was present."""
        row = self.axes.site_index[site]
        values = self.rectangle([row], self.axes.statistic_index[statistic])[0]
        if self.present is None:
            return self.rows, values
        here = self.presence([row])[0]
        return self.rows[here], values[here]

    def rectangle(self, sites: Sequence[int], statistic: int) -> npt.NDArray[np.float64]:
        """One statistic of some sites: (sites, rows)."""
        shape = len(sites), len(self.rows)
        if not all(shape):
            return np.zeros(shape)
        return self._taken(lambda: self._rectangle(sites, statistic), lambda: np.full(shape, np.nan))

    def _taken(self, read: Callable[[], Array], instead: Callable[[], Array]) -> Array:
        try:
            return read()
        except RunCorruptError as damage:
            if self.lenient:
                return instead()
            raise RunCorruptError(
                f"{self.segment.file}: {damage}; partial=True gives NaN for its steps, and everything else"
            ) from damage

    def _rectangle(self, sites: Sequence[int], statistic: int) -> npt.NDArray[np.float64]:
        width = len(self.rows) * 8
        first, last = min(sites), max(sites)
        start = statistic * len(self.axes.sites) * width
        if len(sites) * 4 > last - first:  # nearly all of a stretch: one read
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

    def all_values(self) -> npt.NDArray[np.float64]:
        """Every value: (sites, statistics, rows)."""
        shape = len(self.axes.statistics), len(self.axes.sites), len(self.rows)
        stored: npt.NDArray[np.float64] = self._taken(
            lambda: self.segment.array(self.values, "<f8"), lambda: np.full(shape, np.nan)
        )
        return stored.transpose(1, 0, 2)

    def _presence(self, sites: Sequence[int]) -> npt.NDArray[np.bool_]:
        width = len(self.rows)
        if self.present is None:
            return np.ones((len(sites), width), bool)
        pieces = self.segment.read_ranges(
            self.present, [(site * width, (site + 1) * width) for site in sites]
        )
        return np.stack([np.frombuffer(piece, np.uint8) != 0 for piece in pieces])

    def presence(self, sites: Sequence[int] | None = None) -> npt.NDArray[np.bool_]:
        """Where sites were there: (sites, rows). Where that is damaged, nothing is known to have been there."""
        asked = range(len(self.axes.sites)) if sites is None else sites
        shape = len(asked), len(self.rows)
        if self.present is None or sites is not None:
            return self._taken(lambda: self._presence(asked), lambda: np.zeros(shape, bool))
        entry = self.present
        whole: np.ndarray = self._taken(
            lambda: self.segment.array(entry, "|u1") != 0, lambda: np.zeros(shape, bool)
        )
        return whole


def read_grids(segment: Segment, clock_rows: int, cache: AxesCache) -> list[StoredGrid]:
    """The grids of a scalar segment, checked; values are not read."""
    grids = []
    number = 0
    while f"grid{number}.values" in segment.header.entries:
        axes = _axes(segment.header.metadata.get(f"grid{number}"), cache)
        row_entry = segment.entry(f"grid{number}.rows", "I64")
        rows = segment.array(row_entry, "<i8")
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
