"""At the end of a step: what a receiver holds, as numbers and tensors on the host.

All statistics of a device come over in one read, all other numbers of a device in one more.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchtap.reduce import Full
from torchtap.reduce.moments import STATISTICS
from torchtap.store.record import ScalarBlock, TensorItem
from torchtap.taps.entries import Entry, Fold, Grid
from torchtap.taps.receiver import Receiver

__all__ = ["Collector", "result_of"]

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]


class Collector:
    """Empties a receiver step by step; remembers the shape of each grid, so that equal steps share their names."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._rows: dict[frozenset[int], tuple[int, Rows, tuple[str, ...]]] = {}

    def collect(self) -> tuple[tuple[ScalarBlock, ...], tuple[TensorItem, ...]]:
        """Everything since the last call; afterwards the receiver holds nothing."""
        statistics = self._statistics(self._receiver.grid)
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
                    TensorItem(entry.name, name, fold.reduction.name, value.detach().cpu())
                    for name, value in result.items()
                    if isinstance(value, Tensor) and not _is_number(value)
                )
        for names, (sites, rows) in numbers.items():
            scalars.append(ScalarBlock(self._same(tuple(sites)), self._same(names), _to_host(rows)))
        return tuple(scalars), tuple(tensors)

    def _statistics(self, grid: Grid) -> ScalarBlock | None:
        arrived = np.frombuffer(grid.arrived, dtype=np.bool_)[: len(grid.entries)].copy()
        if not arrived.any():
            return None
        values = grid.block.results()
        grid.clear()
        rows, sites = self._rows_of(grid)
        present = arrived[rows]
        return ScalarBlock(sites, STATISTICS, values[rows], None if present.all() else present)

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


def _to_host(rows: list[list[Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Rows of floats and 0-dim tensors as one array, with one read for each device."""
    values = np.empty((len(rows), len(rows[0])), dtype=np.float64)
    waiting: dict[torch.device, list[tuple[int, int, Tensor]]] = {}
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if isinstance(value, Tensor):
                waiting.setdefault(value.device, []).append((i, j, value))
            else:
                values[i, j] = value
    for cells in waiting.values():
        read = torch.stack([value.detach().to(torch.float64) for _, _, value in cells]).tolist()
        for (i, j, _), number in zip(cells, read, strict=True):
            values[i, j] = number
    return values
