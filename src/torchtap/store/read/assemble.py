"""Series, matrices and tables put together from the grids of all attempts along one timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtap.store.read.clock import Timeline
from torchtap.store.read.grids import StoredGrid
from torchtap.store.read.part import Part
from torchtap.store.read.results import Matrix, Series, Table

__all__ = ["matrix_of", "phases_of", "series_of", "steps_of", "table_of"]


def _grids(parts: Sequence[Part], timeline: Timeline) -> Iterator[tuple[int, StoredGrid]]:
    """Every grid, with where its segment's rows begin on the timeline."""
    for number, part in enumerate(parts):
        for segment in part.scalars:
            for grid in segment.grids:
                start = int(timeline.starts[number]) + segment.start
                yield start, replace(grid, lenient=True) if timeline.partial else grid


def series_of(parts: Sequence[Part], timeline: Timeline, site: str, statistic: str, phase: str) -> Series:
    """One number over the steps of one phase, in ascending order."""
    rows: list[npt.NDArray[np.int64]] = []
    values: list[npt.NDArray[np.float64]] = []
    for start, grid in _grids(parts, timeline):
        if site in grid.axes.site_index and statistic in grid.axes.statistic_index:
            own_rows, own_values = grid.series(site, statistic)
            rows.append(own_rows + start)
            values.append(own_values)
    if not rows:
        return Series(np.zeros(0, np.int64), np.zeros(0))
    row, value = np.concatenate(rows), np.concatenate(values)
    shown = timeline.visible[row]
    if len(timeline.phases) > 1 or phase not in timeline.phases:
        shown = shown & (timeline.clock.phase[row] == phase)
    if not shown.all():
        row, value = row[shown], value[shown]
    if np.any(np.diff(row) <= 0):  # two grids of one record with the same number: the first counts
        row, first = np.unique(row, return_index=True)
        value = value[first]
    value = timeline.settled(row, value)
    steps = timeline.clock.step[row]
    if np.any(np.diff(steps) < 0):
        order = np.argsort(steps, kind="stable")
        steps, value = steps[order], value[order]
    return Series(steps, value)


def phases_of(parts: Sequence[Part], timeline: Timeline) -> dict[str, set[str]]:
    """The phases in which any number of each site was recorded; no values are read for it."""
    found: dict[str, set[str]] = {}
    known: set[tuple[int, str]] = set()  # axes that all arrived in a phase: thousands of grids have the same
    for start, grid in _grids(parts, timeline):
        row = grid.rows + start
        shown = timeline.visible[row]
        here = timeline.clock.phase[row]
        for phase in timeline.phases:
            rows = shown & (here == phase)
            if (id(grid.axes), phase) in known or not rows.any():
                continue
            arrived = _arrived(grid, rows)
            if len(arrived) == len(grid.axes.sites):
                known.add((id(grid.axes), phase))
            for site in arrived:
                found.setdefault(site, set()).add(phase)
    return found


def _arrived(grid: StoredGrid, rows: npt.NDArray[np.bool_]) -> Sequence[str]:
    """The sites of a grid of which any number is in these rows."""
    if grid.present is None:
        return grid.axes.sites
    present = np.atleast_1d(grid.presence()[:, rows].any(axis=1))
    return [site for site, is_there in zip(grid.axes.sites, present, strict=True) if is_there]


def steps_of(parts: Sequence[Part], timeline: Timeline, site: str, phase: str) -> npt.NDArray[np.int64]:
    """The steps at which any number of a site was recorded in a phase; no values are read for it."""
    rows: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    for start, grid in _grids(parts, timeline):
        index = grid.axes.site_index.get(site)
        if index is not None:
            here = grid.rows if grid.present is None else grid.rows[grid.presence([index])[0]]
            rows.append(here + start)
    row = np.concatenate(rows)
    shown = timeline.visible[row] & (timeline.clock.phase[row] == phase)
    return np.unique(timeline.clock.step[row[shown]])


def matrix_of(
    parts: Sequence[Part],
    timeline: Timeline,
    statistic: str,
    sites: Sequence[str],
    steps: npt.NDArray[np.int64] | None,
    phase_of: Callable[[str], str],
) -> Matrix:
    """One statistic of many sites by steps, each site in one phase; the last record of a step counts."""
    wanted = timeline.steps if steps is None else np.unique(np.asarray(steps, np.int64))
    filling = _Filling(timeline, sites, wanted, phase_of)
    for start, grid in _grids(parts, timeline) if len(wanted) else ():
        column = grid.axes.statistic_index.get(statistic)
        if column is not None and len(grid.rows):
            filling.take(grid, column, grid.rows + start)
    values, seen = filling.values, filling.seen
    if steps is None and not seen.all():
        wanted, values = wanted[seen], values[:, seen]
    return Matrix(list(sites), wanted, values)


class _Filling:
    """A matrix of sites by steps that is filled grid by grid."""

    def __init__(
        self,
        timeline: Timeline,
        sites: Sequence[str],
        wanted: npt.NDArray[np.int64],
        phase_of: Callable[[str], str],
    ) -> None:
        self.values = np.full((len(sites), len(wanted)), np.nan)
        self.seen = np.zeros(len(wanted), bool)
        self._timeline = timeline
        self._wanted = wanted
        self._position = {site: index for index, site in enumerate(sites)}
        self._phase_of = phase_of
        # By axes and phase: thousands of grids have the same axes.
        self._shared: dict[tuple[int, str], tuple[list[int], list[int]]] = {}

    def take(self, grid: StoredGrid, column: int, row: npt.NDArray[np.int64]) -> None:
        """Put in what a grid has of the wanted steps, phase by phase."""
        timeline = self._timeline
        step = timeline.clock.step[row]
        target = np.minimum(np.searchsorted(self._wanted, step), len(self._wanted) - 1)
        shown = timeline.visible[row] & (self._wanted[target] == step)
        for phase in timeline.phases:
            keep = shown
            if len(timeline.phases) > 1:
                keep = shown & (timeline.clock.phase[row] == phase)
            if keep.any():
                self._put(grid, column, row, target, keep, phase)

    def _put(
        self,
        grid: StoredGrid,
        column: int,
        row: npt.NDArray[np.int64],
        target: npt.NDArray[np.int64],
        keep: npt.NDArray[np.bool_],
        phase: str,
    ) -> None:
        sources, targets = self._places(grid, phase)
        if not sources:
            return
        found = grid.rectangle(sources, column)
        at = _corner(targets, target[keep])
        if not keep.all():
            found = found[:, keep]
        found = self._timeline.settled(row[keep], found)
        if grid.present is None:
            self.values[at] = found
        else:
            self.values[at] = np.where(grid.presence(sources)[:, keep], found, self.values[at])
        self.seen[target[keep]] = True

    def _places(self, grid: StoredGrid, phase: str) -> tuple[list[int], list[int]]:
        """The rows of a grid whose sites are wanted in this phase, and their rows in the matrix."""
        here = self._shared.get((id(grid.axes), phase))
        if here is None:
            names = [(i, site) for i, site in enumerate(grid.axes.sites) if site in self._position]
            names = [(i, site) for i, site in names if self._phase_of(site) == phase]
            here = [i for i, _ in names], [self._position[site] for _, site in names]
            self._shared[id(grid.axes), phase] = here
        return here


def _corner(rows: list[int], columns: npt.NDArray[np.int64]) -> Any:
    """An index for these rows and columns; plain slices where both lie together, which is many times faster."""
    together = rows == list(range(rows[0], rows[-1] + 1)) and bool(np.all(np.diff(columns) == 1))
    if together:
        return slice(rows[0], rows[-1] + 1), slice(int(columns[0]), int(columns[-1]) + 1)
    return np.ix_(np.asarray(rows), columns)


def table_of(
    parts: Sequence[Part],
    timeline: Timeline,
    site_names: list[str],
    statistic_names: list[str],
) -> Table:
    """Every number of these sites and statistics, by step."""
    site_code = {name: code for code, name in enumerate(site_names)}
    statistic_code = {name: code for code, name in enumerate(statistic_names)}
    pieces = [_NO_CELLS]
    for start, grid in _grids(parts, timeline):
        row = grid.rows + start
        piece = _cells(grid, row, timeline, site_code, statistic_code)
        if piece is not None:
            pieces.append(piece)
    row, sites, statistics, value = (np.concatenate(column) for column in zip(*pieces, strict=True))
    clock = timeline.clock
    step = clock.step[row]
    if np.any(np.diff(step) < 0):
        order = np.argsort(step, kind="stable")
        row, sites, statistics, value, step = (each[order] for each in (row, sites, statistics, value, step))
    phase_codes = np.zeros(len(row), np.int32)
    for code, phase in enumerate(timeline.phases[1:], 1):
        phase_codes[clock.phase[row] == phase] = code
    return Table(
        step,
        clock.epoch[row],
        clock.batch[row],
        phase_codes,
        sites,
        statistics,
        value,
        timeline.phases or ["train"],
        site_names,
        statistic_names,
    )


# A table's cells: their rows on the timeline, the codes of their sites and statistics, their values.
_Cells = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float64]]
_NO_CELLS: _Cells = (np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0))


def _cells(
    grid: StoredGrid,
    row: npt.NDArray[np.int64],
    timeline: Timeline,
    site_code: Mapping[str, int],
    statistic_code: Mapping[str, int],
) -> _Cells | None:
    """What a grid has of a table; None where it has nothing."""
    sites = [index for index, name in enumerate(grid.axes.sites) if name in site_code]
    statistics = [index for index, name in enumerate(grid.axes.statistics) if name in statistic_code]
    shown = timeline.visible[row]
    if not sites or not statistics or not shown.any():
        return None
    values = timeline.settled(row[shown], grid.all_values()[np.ix_(sites, statistics)][:, :, shown])
    values = values.transpose(2, 0, 1)
    codes = np.array([site_code[grid.axes.sites[index]] for index in sites], np.int32)
    kinds = np.array([statistic_code[grid.axes.statistics[index]] for index in statistics], np.int32)
    shape = values.shape
    mask = np.broadcast_to(grid.presence()[sites][:, shown].T[:, :, None], shape)
    return (
        np.broadcast_to(row[shown][:, None, None], shape)[mask],
        np.broadcast_to(codes[None, :, None], shape)[mask],
        np.broadcast_to(kinds[None, None, :], shape)[mask],
        values[mask],
    )
