"""At the end of a step: what a receiver holds, as numbers and tensors on the host.

All statistics of a device come over in one read, all other numbers of a device in one more. Nothing waits for these
where the device can copy by itself: the blocks of numbers are there at once, and `Coming` says when they are filled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from torchtap.reduce import Full
from torchtap.reduce.crossing import Crossing
from torchtap.reduce.moments import STATISTICS
from torchtap.reduce.stats_block import Arriving
from torchtap.store.record import ScalarBlock, TensorItem
from torchtap.taps.receive.entries import Entry, Fold, Grid
from torchtap.taps.receive.receiver import Receiver

__all__ = ["Collector", "Coming", "numbers_on_host", "result_of"]

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@final
@dataclass(frozen=True, slots=True)
class Coming:
    """Numbers of a block that are still on their way from a device."""

    done: Callable[[], bool]
    fill: Callable[[], None]  # waits for them, and puts them into the block


class Collector:
    """Empties a receiver step by step; remembers the shape of each grid, so that equal steps share their names."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._rows: dict[frozenset[int], tuple[int, Rows, tuple[str, ...]]] = {}

    def collect(self) -> tuple[tuple[ScalarBlock, ...], tuple[TensorItem, ...], list[Coming]]:
        """Everything since the last call, and what of it is still to come; afterwards the receiver holds nothing."""
        with self._receiver.lock:
            return self._collect()

    def _collect(self) -> tuple[tuple[ScalarBlock, ...], tuple[TensorItem, ...], list[Coming]]:
        coming: list[Coming] = []
        statistics = self._statistics(self._receiver.grid, coming)
        scalars = [] if statistics is None else [statistics]
        tensors: list[TensorItem] = []
        numbers: dict[tuple[str, ...], tuple[list[str], list[list[Any]]]] = {}
        for entry in self._receiver.entries:
            for fold in entry.live_folds:
                if fold.state is None:
                    continue
                result = _finish(self._receiver, entry, fold)
                names = tuple(name for name, value in result.items() if _is_number(value))
                if names:
                    sites, rows = numbers.setdefault(names, ([], []))
                    sites.append(entry.name)
                    rows.append([result[name] for name in names])
                tensors.extend(
                    TensorItem(entry.name, name, fold.reduction.name, _on_host(value))
                    for name, value in result.items()
                    if isinstance(value, Tensor) and not _is_number(value)
                )
        for names, (sites, rows) in numbers.items():
            values = numbers_on_host(rows, coming)
            scalars.append(ScalarBlock(self._same(tuple(sites)), self._same(names), values))
        return tuple(scalars), tuple(tensors), coming

    def _statistics(self, grid: Grid, coming: list[Coming]) -> ScalarBlock | None:
        arrived = np.frombuffer(grid.arrived, dtype=np.bool_)[: len(grid.entries)].copy()
        if not arrived.any():
            return None
        rows, sites = self._rows_of(grid)
        arriving = grid.block.hand_over()
        if arriving is None:
            values = grid.block.results()[rows]
        else:
            values = np.empty((len(rows), len(STATISTICS)))
            coming.append(Coming(arriving.done, partial(_fill_statistics, values, arriving, rows)))
        grid.clear()
        present = arrived[rows]
        return ScalarBlock(sites, STATISTICS, values, None if present.all() else present)

    def _rows_of(self, grid: Grid) -> tuple[Rows, tuple[str, ...]]:
        """The rows that live taps want statistics of, and their sites: one set a schedule, growing with new sites."""
        live = self._receiver.live
        known = self._rows.get(live)
        if known is None or known[0] != len(grid.entries):
            wanted = [entry for entry in grid.entries if self._receiver.wants_statistics(entry)]
            rows = np.array([entry.row for entry in wanted], dtype=np.intp)
            sites = self._same(tuple(entry.name for entry in wanted))
            known = self._rows[live] = (len(grid.entries), rows, sites)
        return known[1:]

    def _same(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """One object for equal tuples: consumers cache by identity."""
        return self._known.setdefault(names, names)


def _on_host(value: Tensor) -> Tensor:
    # the very tensor where it can be: the store knows its own copies, and the checksums that it took of them
    return (value.detach() if value.requires_grad else value).cpu()


def result_of(receiver: Receiver, entry: Entry) -> Any:
    """What was kept at a site so far: a tensor for whole tensors, else a dict of named results."""
    results: dict[str, Any] = {}
    grid = receiver.grid
    if entry.row >= 0 and grid.arrived[entry.row]:
        results["stats"] = dict(zip(STATISTICS, grid.block.result(entry.row).tolist(), strict=True))
    for fold in entry.folds.values():
        if fold.state is not None:
            result = fold.reduction.result(fold.state)
            if isinstance(fold.reduction, Full):
                results[fold.reduction.name] = result["value"]
            else:
                results[fold.reduction.name] = result
    if len(results) == 1:
        return next(iter(results.values()))
    return results


def _finish(receiver: Receiver, entry: Entry, fold: Fold) -> dict[str, Any]:
    state, fold.state = fold.state, None
    try:
        return fold.reduction.result(state)
    except Exception as error:
        receiver.lose(entry, error)
        return {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)


def numbers_on_host(rows: list[list[Any]], coming: list[Coming]) -> Numbers:
    """Rows of floats and 0-dim tensors as one array, with one read for each device; some may be ``coming``."""
    values = np.empty((len(rows), len(rows[0])), dtype=np.float64)
    waiting: dict[torch.device, list[tuple[int, int, Tensor]]] = {}
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if isinstance(value, Tensor):
                waiting.setdefault(value.device, []).append((i, j, value))
            else:
                values[i, j] = value
    for device, cells in waiting.items():
        wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        crossing = Crossing([torch.stack([value.detach().to(wide) for _, _, value in cells])])
        fill = partial(_fill_cells, values, crossing, [(i, j) for i, j, _ in cells])
        if crossing.done():
            fill()
        else:
            coming.append(Coming(crossing.done, fill))
    return values


def _fill_statistics(values: Numbers, arriving: Arriving, rows: Rows) -> None:
    values[...] = arriving.results()[rows]


def _fill_cells(values: Numbers, crossing: Crossing, cells: list[tuple[int, int]]) -> None:
    for (i, j), number in zip(cells, crossing.wait()[0].tolist(), strict=True):
        values[i, j] = number
