"""At the end of a step: what a phase holds, as numbers and tensors on the host.

All statistics of a device are copied to the host in one go, all other numbers of a device in one more, and all whole
tensors in a third, on a stream of its own. None of these waits if the device can copy by itself: blocks and tensors
are made at once, and `PendingNumbers` tells when they are filled. Reductions that need the host to compute their
results, such as `Histogram`, wait: once for all sites of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtap._torch import pytree
from torchtap.receive.receiver import Accumulator, Fold, PhaseState, SiteState
from torchtap.reduce.device_copy import Crossing, line_to
from torchtap.reduce.elements import Full
from torchtap.reduce.moments import merged_results
from torchtap.reduce.reduction import AnyReduction
from torchtap.store.record import ScalarBlock, TensorItem

if TYPE_CHECKING:
    from torchtap.receive.placing import Placing

__all__ = [
    "Collected",
    "Collector",
    "Numbers",
    "PendingNumbers",
    "numbers_on_host",
    "result_of",
    "tensors_on_host",
]

Rows: TypeAlias = npt.NDArray[np.intp]
Numbers: TypeAlias = npt.NDArray[np.float64]


@final
class PendingNumbers(NamedTuple):
    """Numbers of a block that are still on their way from a device."""

    done: Callable[[], bool]
    fill: Callable[[], object]  # waits for them, and puts them into the block


@final
class Collected(NamedTuple):
    """What phases held: passes, numbers, tensors, and the numbers that are still on their way from a device."""

    passes: int
    scalars: tuple[ScalarBlock, ...]
    tensors: tuple[TensorItem, ...]
    coming: list[PendingNumbers]


@final
class Collector:
    """Empties phases step by step; remembers the shape of each grid, so that equal steps share their names."""

    def __init__(self, accumulator: Accumulator, placing: Placing | None = None) -> None:
        self._accumulator = accumulator
        self._placing = placing  # not None if a reader will merge what is collected with other processes'
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._rows: dict[frozenset[int], tuple[int, Rows, tuple[str, ...]]] = {}

    def collect(self, keys: Iterable[int], live: frozenset[int], name: str) -> Collected:
        """Return what the phases of these keys hold for some taps; ``name`` is the phase that they turned out to be.

        Afterwards they hold nothing, and the keys have no phases.
        """
        accumulator, coming = self._accumulator, list[PendingNumbers]()
        with accumulator.lock:
            phases = accumulator.release(keys)
            if self._placing is not None:
                for phase in phases:
                    self._placing.relabel(phase.key, name)
            passes = sum([phase.passes for phase in phases])
            try:
                statistics = self._statistics(phases, live, coming)
                if not accumulator.folded and not any(phase.numbers for phase in phases):  # most often
                    for phase in phases:
                        phase.clear()
                    return Collected(passes, () if statistics is None else (statistics,), (), coming)
                return Collected(passes, *self._collect(phases, live, statistics, coming))
            except Exception as error:  # such as out of memory: it must not end the training
                accumulator.drop(phases)
                accumulator.lose("a step", error)
                return Collected(passes, (), (), [])

    def peek(self, keys: Iterable[int], live: frozenset[int]) -> tuple[int, ScalarBlock | None]:
        """Return the passes and statistics of phases so far, which they keep. Waits for what is on a device."""
        accumulator = self._accumulator
        with accumulator.lock:
            phases = [accumulator.phases[key] for key in keys if key in accumulator.phases]
            passes = sum(phase.passes for phase in phases)
            for phase in phases:
                phase.reserve(len(accumulator.rows))
            held = [phase for phase in phases if 1 in phase.arrived]
            if not held:
                return passes, None
            rows, sites = self._rows_of(live)
            values = merged_results([phase.block.states() for phase in held])[rows]
            return passes, ScalarBlock(sites, held[0].block.statistics, values, self._present(held, rows))

    def _collect(
        self,
        phases: Sequence[PhaseState],
        live: frozenset[int],
        statistics: ScalarBlock | None,
        coming: list[PendingNumbers],
    ) -> tuple[tuple[ScalarBlock, ...], tuple[TensorItem, ...], list[PendingNumbers]]:
        """The same, where not all that they hold are statistics."""
        scalars = [] if statistics is None else [statistics]
        tensors: list[TensorItem] = []
        numbers: dict[tuple[str, ...], tuple[list[str], list[list[Any]]]] = {}
        folds: list[tuple[SiteState, Fold]] = []
        for site in self._accumulator.folded:
            wanted = self._accumulator.fold_keys(site, live)
            for fold in self._merged_folds(site, phases):
                if fold.key in wanted:
                    folds.append((site, fold))
                else:
                    fold.state = None
        _fetch_states([fold for _, fold in folds if not fold.reduction.whole])
        for site, fold in folds:
            result = self._finish(site, fold)
            _add_numbers(numbers, site.name, result)
            tensors.extend(
                TensorItem(site.name, name, fold.reduction.name, value)
                for name, value in result.items()
                if isinstance(value, Tensor) and not _is_number(value)
            )
        tensors = tensors_on_host(tensors, coming)
        came: dict[tuple[str, str], Any] = {}
        for phase in phases:
            for statistic, of_sites in phase.numbers.items():
                came |= {(site, statistic): number for site, number in of_sites.items()}
            phase.clear()
        for (name, statistic), number in came.items():
            _add_numbers(numbers, name, {statistic: number})
        for names, (sites, rows) in numbers.items():
            values = numbers_on_host(rows, coming)
            scalars.append(ScalarBlock(self._same(tuple(sites)), self._same(names), values))
        return tuple(scalars), tuple(tensors), coming

    def _merged_folds(self, site: SiteState, phases: Sequence[PhaseState]) -> list[Fold]:
        """Return a site's folds, the states of several phases merged into the first that has one."""
        first: dict[str, Fold] = {}
        for phase in phases:
            for fold in site.folds.get(phase.key, {}).values():
                if fold.state is None:
                    continue
                into = first.setdefault(fold.key, fold)
                if into is not fold:
                    try:
                        into.state = into.reduction.merge(into.state, fold.state)
                        into.seconds, fold.seconds = into.seconds + fold.seconds, 0.0
                    except Exception as error:
                        self._accumulator.lose(site.name, error)
                    fold.state = None
        return list(first.values())

    def _statistics(
        self, phases: Sequence[PhaseState], live: frozenset[int], coming: list[PendingNumbers]
    ) -> ScalarBlock | None:
        for phase in phases:
            if len(self._accumulator.rows) > len(phase.arrived):
                phase.reserve(len(self._accumulator.rows))
        held = [phase for phase in phases if 1 in phase.arrived]
        rows, sites = self._rows_of(live)
        if not held or not len(rows):
            return None
        present = self._present(held, rows)
        if present is not None and not present.any():
            return None
        blocks = [phase.block for phase in held]
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
        accumulator = self._accumulator
        known = self._rows.get(live)
        if known is None or known[0] != len(accumulator.rows):
            wanted = [site for site in accumulator.rows if accumulator.wants_row(site, live)]
            rows = np.array([site.row for site in wanted], dtype=np.intp)
            sites = self._same(tuple(site.name for site in wanted))
            known = self._rows[live] = (len(accumulator.rows), rows, sites)
        return known[1:]

    def _present(self, phases: Sequence[PhaseState], rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Which of these rows have something in them; None where all have."""
        arrived = phases[0].arrived
        if len(phases) == 1 and arrived.count(1) == len(rows) == len(self._accumulator.rows):
            return None
        present = np.frombuffer(arrived, dtype=np.bool_)[rows]
        for phase in phases[1:]:
            present = present | np.frombuffer(phase.arrived, dtype=np.bool_)[rows]
        return None if present.all() else present

    def _finish(self, site: SiteState, fold: Fold) -> dict[str, Any]:
        state, fold.state = fold.state, None
        try:
            result = _staying(fold.reduction).result(state)
            return {**result, **fold.reduction.to_merge(state)} if self._placing is not None else result
        except Exception as error:
            self._accumulator.lose(site.name, error)
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


def tensors_on_host(tensors: list[TensorItem], coming: list[PendingNumbers]) -> list[TensorItem]:
    """Start to copy whole tensors to the host, with one event for each device; some may be ``coming``."""
    found = list(tensors)
    for device in {item.value.device for item in tensors if not item.value.is_cpu}:
        places = [place for place, item in enumerate(tensors) if item.value.device == device]
        crossing = Crossing([tensors[place].value.detach() for place in places])
        for place, host in zip(places, crossing.hosts, strict=True):
            found[place] = replace(tensors[place], value=host)
        if not crossing.done():
            coming.append(PendingNumbers(crossing.done, crossing.wait))
    # the very tensor where it can be: the store knows its own copies, and the checksums that it took of them
    return [replace(item, value=item.value.detach()) if item.value.requires_grad else item for item in found]


@cache
def _staying(reduction: AnyReduction) -> AnyReduction:
    """Return the reduction, or for whole tensors one whose results stay on the device."""
    return replace(reduction, device=None) if isinstance(reduction, Full) else reduction


def _fetch_states(folds: list[Fold]) -> None:
    """Replace states on devices by copies on the host: one wait for each device."""
    found: dict[torch.device, list[tuple[Fold, Any, list[Any], int]]] = {}
    for fold in folds:
        leaves, spec = pytree.tree_flatten(fold.state)
        for place, leaf in enumerate(leaves):
            if type(leaf) is Tensor and not leaf.is_cpu:
                found.setdefault(leaf.device, []).append((fold, spec, leaves, place))
    for parts in found.values():
        crossing = Crossing([leaves[place].detach() for _, _, leaves, place in parts])
        for (fold, spec, leaves, place), host in zip(parts, crossing.wait(), strict=True):
            leaves[place] = host
            fold.state = pytree.tree_unflatten(leaves, spec)


def result_of(accumulator: Accumulator, site: SiteState) -> Any:
    """What was kept at a site so far: a tensor for whole tensors, else a dict of named results."""
    results = _results(accumulator, site)
    over_passes = accumulator.over_passes.get(site.name)
    if over_passes is not None and over_passes is not site:
        results |= _results(accumulator, over_passes)
    if len(results) == 1:
        return next(iter(results.values()))
    return results


def _results(accumulator: Accumulator, site: SiteState) -> dict[str, Any]:
    results: dict[str, Any] = {}
    phase = accumulator.phase
    if 0 <= site.row < len(phase.arrived) and phase.arrived[site.row]:
        block = phase.block
        results["stats"] = dict(
            zip(block.statistics, block.results(np.array([site.row]))[0].tolist(), strict=True)
        )
    for fold in site.folds.get(phase.key, {}).values():
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
    waiting: dict[torch.device, dict[torch.dtype, list[tuple[int, int, Tensor]]]] = {}
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if isinstance(value, Tensor):
                waiting.setdefault(value.device, {}).setdefault(value.dtype, []).append((i, j, value))
            else:
                values[i, j] = value
    for device, cells in waiting.items():
        wide = line_to(device).wide  # converted once for each dtype: a launch each
        stacks = [torch.stack([value.detach() for _, _, value in same]).to(wide) for same in cells.values()]
        crossing = Crossing([torch.cat(stacks) if len(stacks) > 1 else stacks[0]], beside=False)
        fill = partial(_fill_cells, values, crossing, [(i, j) for same in cells.values() for i, j, _ in same])
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
