"""Series, matrices and tables put together from the grids of all attempts along one timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtap.store.read.clock import Timeline
from torchtap.store.read.grids import Grid
from torchtap.store.read.part import Part
from torchtap.store.read.results import Matrix, Series, Table

__all__ = ["matrix_of", "phases_of", "series_of", "steps_of", "table_of"]


def _grids(parts: Sequence[Part], timeline: Timeline) -> Iterator[tuple[int, Grid]]:
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
            arrived = None if grid.present is None else np.atleast_1d(grid.presence()[:, rows].any(axis=1))
            if arrived is None or arrived.all():
                known.add((id(grid.axes), phase))
            for index, site in enumerate(grid.axes.sites):
                if arrived is None or arrived[index]:
                    found.setdefault(site, set()).add(phase)
    return found


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
    values = np.full((len(sites), len(wanted)), np.nan)
    position = {site: index for index, site in enumerate(sites)}
    seen = np.zeros(len(wanted), bool)
    shared: dict[
        tuple[int, str], list[tuple[int, int]]
    ] = {}  # by axes, which thousands of grids have in common
    for start, grid, phase in (
        (*each, phase) for each in _grids(parts, timeline) for phase in timeline.phases
    ):
        column = grid.axes.statistic_index.get(statistic)
        if column is None or not len(wanted) or not len(grid.rows):
            continue
        row = grid.rows + start
        step = timeline.clock.step[row]
        target = np.minimum(np.searchsorted(wanted, step), len(wanted) - 1)
        keep = timeline.visible[row] & (wanted[target] == step)
        if len(timeline.phases) > 1:
            keep &= timeline.clock.phase[row] == phase
        if not keep.any():
            continue
        here = shared.get((id(grid.axes), phase))
        if here is None:
            names = [(i, site) for i, site in enumerate(grid.axes.sites) if site in position]
            here = [(i, position[site]) for i, site in names if phase_of(site) == phase]
            shared[id(grid.axes), phase] = here
        if not here:
            continue
        sources = [index for index, _ in here]
        found = grid.rectangle(sources, column)
        at = _corner([index for _, index in here], target[keep])
        if not keep.all():
            found = found[:, keep]
        found = timeline.settled(row[keep], found)
        if grid.present is None:
            values[at] = found
        else:
            values[at] = np.where(grid.presence(sources)[:, keep], found, values[at])
        seen[target[keep]] = True
    if steps is None and not seen.all():
        wanted, values = wanted[seen], values[:, seen]
    return Matrix(list(sites), wanted, values)


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
    pieces: list[tuple[npt.NDArray[Any], ...]] = []
    for start, grid in _grids(parts, timeline):
        sites = [index for index, name in enumerate(grid.axes.sites) if name in site_code]
        statistics = [index for index, name in enumerate(grid.axes.statistics) if name in statistic_code]
        row = grid.rows + start
        shown = timeline.visible[row]
        if not sites or not statistics or not shown.any():
            continue
        values = timeline.settled(row[shown], grid.all_values()[np.ix_(sites, statistics)][:, :, shown])
        values = values.transpose(2, 0, 1)
        present = grid.presence()[sites][:, shown].T
        codes = np.array([site_code[grid.axes.sites[index]] for index in sites], np.int32)
        kinds = np.array([statistic_code[grid.axes.statistics[index]] for index in statistics], np.int32)
        shape = values.shape
        mask = np.broadcast_to(present[:, :, None], shape)
        pieces.append(
            (
                np.broadcast_to(row[shown][:, None, None], shape)[mask],
                np.broadcast_to(codes[None, :, None], shape)[mask],
                np.broadcast_to(kinds[None, None, :], shape)[mask],
                values[mask],
            )
        )
    if pieces:
        row, sites_, kinds_, value = (np.concatenate(column) for column in zip(*pieces, strict=True))
    else:
        row, sites_, kinds_ = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32)
        value = np.zeros(0)
    clock = timeline.clock
    step = clock.step[row]
    if np.any(np.diff(step) < 0):
        order = np.argsort(step, kind="stable")
        row, sites_, kinds_, value, step = row[order], sites_[order], kinds_[order], value[order], step[order]
    phase_codes = np.zeros(len(row), np.int32)
    for code, phase in enumerate(timeline.phases[1:], 1):
        phase_codes[clock.phase[row] == phase] = code
    return Table(
        step,
        clock.epoch[row],
        clock.batch[row],
        phase_codes,
        sites_,
        kinds_,
        value,
        timeline.phases or ["train"],
        site_names,
        statistic_names,
    )
