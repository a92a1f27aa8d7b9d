"""At the end of a step: what a tally holds, as numbers and tensors on the host.

All statistics of a device come over in one read, all other numbers of a device in one more. Nothing waits for these
where the device can copy by itself: the blocks of numbers are there at once, and `PendingNumbers` says when they are
filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtap.receive.entries import Entry, Fold, Tally
from torchtap.receive.folding import Folding
from torchtap.reduce.crossing import Crossing
from torchtap.reduce.moments import merged_results
from torchtap.store.record import ScalarBlock, TensorItem

__all__ = ["Collected", "Collector", "PendingNumbers", "numbers_on_host", "result_of"]

Rows: TypeAlias = npt.NDArray[np.intp]
Numbers: TypeAlias = npt.NDArray[np.float64]


@final
class PendingNumbers(NamedTuple):
    """Numbers of a block that are still on their way from a device."""

    done: Callable[[], bool]
    fill: Callable[[], None]  # waits for them, and puts them into the block


# What a tally held: its numbers, its tensors, and the numbers that are still on their way from a device.
Collected: TypeAlias = tuple[tuple[ScalarBlock, ...], tuple[TensorItem, ...], list[PendingNumbers]]


@final
class Collector:
    """Empties tallies step by step; remembers the shape of each grid, so that equal steps share their names."""

    def __init__(self, folding: Folding, *, among_ranks: bool = False) -> None:
        self._folding = folding
        self._among_ranks = among_ranks  # whether a reader will merge what is collected with other processes'
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._rows: dict[frozenset[int], tuple[int, Rows, tuple[str, ...]]] = {}

    def collect(self, tallies: Sequence[Tally], live: frozenset[int]) -> Collected:
        """Return what tallies of one step and phase hold for these taps, and what of it is still to come.

        Afterwards they hold nothing.
        """
        folding, coming = self._folding, list[PendingNumbers]()
        with folding.lock:
            try:
                statistics = self._statistics(tallies, live, coming)
                if not folding.folded and not any(tally.numbers for tally in tallies):  # most often
                    for tally in tallies:
                        tally.clear()
                    return (() if statistics is None else (statistics,)), (), coming
                return self._collect(tallies, live, statistics, coming)
            except Exception as error:  # such as out of memory: it must not end the training
                for tally in tallies:
                    folding.drop(tally)
                folding.lose("a step", error)
                return (), (), []

    def peek(self, tallies: Sequence[Tally], live: frozenset[int]) -> ScalarBlock | None:
        """Return the statistics that tallies hold so far; they go on holding them. Waits for what is on a device."""
        with self._folding.lock:
            for tally in tallies:
                tally.reserve(len(self._folding.rows))
            held = [tally for tally in tallies if 1 in tally.arrived]
            if not held:
                return None
            rows, sites = self._rows_of(live)
            values = merged_results([tally.block.states() for tally in held])[rows]
            return ScalarBlock(sites, held[0].block.statistics, values, self._present(held, rows))

    def _collect(
        self,
        tallies: Sequence[Tally],
        live: frozenset[int],
        statistics: ScalarBlock | None,
        coming: list[PendingNumbers],
    ) -> Collected:
        """The same, where not all that they hold are statistics."""
        scalars = [] if statistics is None else [statistics]
        tensors: list[TensorItem] = []
        numbers: dict[tuple[str, ...], tuple[list[str], list[list[Any]]]] = {}
        for entry in self._folding.folded:
            wanted = self._folding.fold_keys(entry, live)
            for fold in self._merged_folds(entry, tallies):
                if fold.state is None or fold.key not in wanted:
                    fold.state = None
                    continue
                result = self._finish(entry, fold)
                _add_numbers(numbers, entry.name, result)
                tensors.extend(
                    TensorItem(entry.name, name, fold.reduction.name, _on_host(value))
                    for name, value in result.items()
                    if isinstance(value, Tensor) and not _is_number(value)
                )
        came: dict[tuple[str, str], Any] = {}
        for tally in tallies:
            for statistic, of_sites in tally.numbers.items():
                came |= {(site, statistic): number for site, number in of_sites.items()}
            tally.clear()
        for (site, statistic), number in came.items():
            _add_numbers(numbers, site, {statistic: number})
        for names, (sites, rows) in numbers.items():
            values = numbers_on_host(rows, coming)
            scalars.append(ScalarBlock(self._same(tuple(sites)), self._same(names), values))
        return tuple(scalars), tuple(tensors), coming

    def _merged_folds(self, entry: Entry, tallies: Sequence[Tally]) -> list[Fold]:
        """Return an entry's folds, the states of several tallies merged into the first that has one."""
        first: dict[str, Fold] = {}
        for tally in tallies:
            for fold in entry.folds.get(tally.phase, {}).values():
                if fold.state is None:
                    continue
                into = first.setdefault(fold.key, fold)
                if into is not fold:
                    try:
                        into.state = into.reduction.merge(into.state, fold.state)
                        into.seconds, fold.seconds = into.seconds + fold.seconds, 0.0
                    except Exception as error:
                        self._folding.lose(entry.name, error)
                    fold.state = None
        return list(first.values())

    def _statistics(
        self, tallies: Sequence[Tally], live: frozenset[int], coming: list[PendingNumbers]
    ) -> ScalarBlock | None:
        for tally in tallies:
            if len(self._folding.rows) > len(tally.arrived):
                tally.reserve(len(self._folding.rows))
        held = [tally for tally in tallies if 1 in tally.arrived]
        rows, sites = self._rows_of(live)
        if not held or not len(rows):
            return None
        present = self._present(held, rows)
        if present is not None and not present.any():
            return None
        blocks = [tally.block for tally in held]
        arriving = [block.hand_over() for block in blocks]
        if len(held) == 1 and arriving[0] is None:
            values = blocks[0].results(rows)
        else:
            states = [
                block.states() if came is None else came for block, came in zip(blocks, arriving, strict=True)
            ]
            values = np.empty((len(rows), len(blocks[0].statistics)))
            fill = partial(_fill_merged, values, states, rows)
            on_the_way = [each for each in arriving if each is not None]
            if on_the_way:
                coming.append(PendingNumbers(lambda: all(each.done() for each in on_the_way), fill))
            else:
                fill()
        return ScalarBlock(sites, blocks[0].statistics, values, present)

    def _rows_of(self, live: frozenset[int]) -> tuple[Rows, tuple[str, ...]]:
        """The rows that live taps want statistics of, and their sites: one set a schedule, growing with new sites."""
        folding = self._folding
        known = self._rows.get(live)
        if known is None or known[0] != len(folding.rows):
            wanted = [entry for entry in folding.rows if folding.wants_row(entry, live)]
            rows = np.array([entry.row for entry in wanted], dtype=np.intp)
            sites = self._same(tuple(entry.name for entry in wanted))
            known = self._rows[live] = (len(folding.rows), rows, sites)
        return known[1:]

    def _present(self, tallies: Sequence[Tally], rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Which of these rows have something in them; None where all have."""
        arrived = tallies[0].arrived
        if len(tallies) == 1 and arrived.count(1) == len(rows) == len(self._folding.rows):
            return None
        present = np.frombuffer(arrived, dtype=np.bool_)[rows]
        for tally in tallies[1:]:
            present = present | np.frombuffer(tally.arrived, dtype=np.bool_)[rows]
        return None if present.all() else present

    def _finish(self, entry: Entry, fold: Fold) -> dict[str, Any]:
        state, fold.state = fold.state, None
        try:
            result = fold.reduction.result(state)
            return {**result, **fold.reduction.to_merge(state)} if self._among_ranks else result
        except Exception as error:
            self._folding.lose(entry.name, error)
            return {}

    def _same(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """One object for equal tuples: consumers cache by identity."""
        return self._known.setdefault(names, names)


def _add_numbers(
    numbers: dict[tuple[str, ...], tuple[list[str], list[list[Any]]]], site: str, result: dict[str, Any]
) -> None:
    """Sort the numbers among a site's results in, beside those of the same names."""
    names = tuple(name for name, value in result.items() if _is_number(value))
    if names:
        sites, rows = numbers.setdefault(names, ([], []))
        sites.append(site)
        rows.append([result[name] for name in names])


def _on_host(value: Tensor) -> Tensor:
    # the very tensor where it can be: the store knows its own copies, and the checksums that it took of them
    return (value.detach() if value.requires_grad else value).cpu()


def result_of(folding: Folding, entry: Entry) -> Any:
    """What was kept at a site so far: a tensor for whole tensors, else a dict of named results."""
    results = _results(folding, entry)
    over_passes = folding.over_passes.get(entry.name)
    if over_passes is not None and over_passes is not entry:
        results |= _results(folding, over_passes)
    if len(results) == 1:
        return next(iter(results.values()))
    return results


def _results(folding: Folding, entry: Entry) -> dict[str, Any]:
    results: dict[str, Any] = {}
    tally = folding.tally
    if 0 <= entry.row < len(tally.arrived) and tally.arrived[entry.row]:
        block = tally.block
        results["stats"] = dict(zip(block.statistics, block.result(entry.row).tolist(), strict=True))
    for fold in entry.folds.get(tally.phase, {}).values():
        if fold.state is not None:
            result = fold.reduction.result(fold.state)
            results[fold.reduction.name] = (
                result["value"]
                if fold.reduction.whole
                else {name: _plain(value) for name, value in result.items()}
            )
    return results


def _plain(value: object) -> Any:
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)


def numbers_on_host(rows: list[list[Any]], coming: list[PendingNumbers]) -> Numbers:
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
            coming.append(PendingNumbers(crossing.done, fill))
    return values


def _fill_merged(values: Numbers, states: list[Any], rows: Rows) -> None:
    """Merge the states of several blocks, those that were on their way to the host included."""
    values[...] = merged_results(
        [each if isinstance(each, np.ndarray) else each.states() for each in states]
    )[rows]


def _fill_cells(values: Numbers, crossing: Crossing, cells: list[tuple[int, int]]) -> None:
    for (i, j), number in zip(cells, crossing.wait()[0].tolist(), strict=True):
        values[i, j] = number
