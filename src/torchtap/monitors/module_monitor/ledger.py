"""What a monitor has measured in the step that is open, until its end makes numbers of it.

Metrics whose formula is known share one pass over a value, which leaves a row of moments here; every other metric
leaves its result. It guarantees:
- nothing is read from a device before `finish`, and then each device once;
- a value that shows up again unchanged (a container's output is its last child's) is not read again;
- a formula is used only where it is exact: real floating-point values, all finite, two at least. Otherwise the
  metric is called.

Not here: recognising formulas (`expressions`), keys and steps (`storage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtap._torch import foreach_norm
from torchtap.errors import MetricError
from torchtap.monitors.module_monitor.expressions import Reading
from torchtap.monitors.module_monitor.stand_ins import Formula, l2
from torchtap.monitors.module_monitor.storage import StorageManager, means
from torchtap.receive.entries import RecentValues
from torchtap.reduce import kernel
from torchtap.reduce.memory import PLAIN_TYPES
from torchtap.reduce.moments import WIDTH

__all__ = ["BoundMetrics", "Ledger", "PlacedMetric"]

_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_ROW_BYTES = WIDTH * 8
Numbers = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class PlacedMetric:
    """One metric at one place: ``key`` is what its number is logged as."""

    key: str
    name: str
    place: str
    function: Callable[..., Any]
    aggregate: Callable[[object], object] | None
    reading: Reading


@final
class BoundMetrics:
    """All metrics of one place. ``scalar``: results are single numbers, not tensors to be averaged."""

    __slots__ = ("called", "metrics", "place", "read", "scalar", "subject", "wants_norm_only")

    def __init__(self, place: str, subject: str, metrics: list[PlacedMetric], scalar: bool) -> None:
        self.place = place
        self.subject = subject  # "activations", "parameter" ...: for errors
        self.scalar = scalar
        self.metrics = tuple(metrics)
        known = [metric for metric in metrics if metric.reading.formula is not None]
        self.read = tuple(known)
        self.called = tuple(metric for metric in metrics if metric.reading.formula is None)
        self.wants_norm_only = bool(known) and not self.called and all(m.reading.formula is l2 for m in known)


@final
class Ledger:
    """The open step's measurements."""

    def __init__(self) -> None:
        self._native = kernel.native
        self._rows = np.zeros((256, WIDTH))
        self._taker = kernel.make_taker()
        self._note_address()
        self._used = 0
        self._bounds: list[BoundMetrics] = []  # beside _bound_rows: who wants what of which row
        self._bound_rows: list[int] = []
        self._results: list[tuple[BoundMetrics, PlacedMetric, Tensor]] = []
        self._norms: list[tuple[list[BoundMetrics], Tensor]] = []
        # Sums of what was added under several keys, and over how many numbers each is.
        self._added: list[tuple[tuple[str, ...], Numbers, Numbers]] = []
        self._recent = RecentValues()
        self._recent_rows = [-1] * RecentValues.SLOTS  # the row of what is in each slot; -1: not measured
        self._layout: _Layout | None = None

    def _note_address(self) -> None:
        self._address = int(self._rows.ctypes.data)
        self._cells = memoryview(self._rows.data).cast("B").cast("d")
        if self._taker is not None:
            self._taker.use_rows(self._address, len(self._rows))

    # -- values come in -----------------------------------------------------------------------------------

    def take(self, bound: BoundMetrics, value: Tensor) -> None:
        """All metrics of a place on one value."""
        if bound.read:
            row = self._put(value)
            if row < 0:
                slot, known = self._recent.slot_of(value)
                if known:
                    row = self._recent_rows[slot]
                else:
                    row = self._recent_rows[slot] = self._measure(value)
            if row >= 0:
                self._bounds.append(bound)
                self._bound_rows.append(row)
            else:
                # Without the kernel too a norm is the norm itself, not what half precision can hold of it.
                self.call(bound, bound.read, value.double() if value.dtype in _HALVES else value)
        if bound.called:
            self.call(bound, bound.called, value)

    def take_all(self, bounds: list[BoundMetrics], values: list[Tensor]) -> None:
        """Many values at once. Where only the norm is wanted, torch has one call for all of them."""
        if not all(bound.wants_norm_only for bound in bounds) or not PLAIN_TYPES.issuperset(
            map(type, values)
        ):
            for bound, value in zip(bounds, values, strict=True):
                self.take(bound, value)
            return
        with torch.no_grad():
            for some, their in _alike(bounds, values):
                dtype = their[0].dtype
                if dtype not in _FLOATS:
                    for bound, value in zip(some, their, strict=True):
                        self.take(bound, value)
                    continue
                wide = torch.float32 if dtype in _HALVES else None
                self._norms.append((some, torch.stack(list(foreach_norm(their, 2, wide)))))

    def add(self, keys: tuple[str, ...], totals: Numbers, counts: Numbers) -> None:
        """Sums, each over so many numbers, to be averaged under their keys."""
        for index, (known, before, counted) in enumerate(self._added):
            if known is keys or known == keys:
                self._added[index] = (keys, before + totals, counted + counts)
                return
        self._added.append((keys, totals, counts))

    def take_pair(self, bound: BoundMetrics, value: Tensor, reference: Tensor) -> None:
        """All metrics of a place on a value and its reference."""
        if bound.read:
            row = -1
            if value.shape == reference.shape and value.dtype == reference.dtype and self._native is not None:
                row = self._measure(value.detach() - reference.detach())
            if row >= 0:
                self._bounds.append(bound)
                self._bound_rows.append(row)
            else:
                self.call(bound, bound.read, value, reference)
        if bound.called:
            self.call(bound, bound.called, value, reference)

    def call(self, bound: BoundMetrics, metrics: tuple[PlacedMetric, ...], *values: Tensor) -> None:
        """Metrics that have to be called. One that may change its arguments gets copies."""
        plain = values if bound.subject.startswith("parameter") else tuple(v.detach() for v in values)
        copies: tuple[Tensor, ...] | None = None
        for metric in metrics:
            try:
                given = plain
                if not metric.reading.safe and bound.subject in ("activations", "activation differences"):
                    given = copies = copies or tuple(each.clone() for each in plain)
                result = metric.function(*given)
                tensor = _as_tensor(result, values)
                if bound.scalar and tensor.numel() != 1:
                    raise MetricError(f"it gave a tensor of shape {tuple(tensor.shape)}, not one number")
            except Exception as error:
                raise self._failure(bound, metric, values[0], error) from error
            self._results.append((bound, metric, tensor))

    @staticmethod
    def _failure(bound: BoundMetrics, metric: PlacedMetric, value: Tensor, error: Exception) -> MetricError:
        shape = tuple(value.shape)
        said = str(error) if isinstance(error, MetricError) else f"{type(error).__name__}: {error}"
        if bound.scalar:
            return MetricError(
                f"Failed to monitor {bound.subject} {bound.place} of shape {shape} with metric {metric.name}: {said}"
            )
        return MetricError(
            f"Failed to monitor activations of module {bound.place}. Failed to monitor metric {metric.name} for the "
            f"{bound.subject} of module {bound.place} (activation shape {shape}): {said}"
        )

    def _put(self, value: Tensor) -> int:
        """The row of a small value, measured or recognised by native code; -1 where that is not possible."""
        row = self._used
        if row == len(self._rows):
            self._next_row()
        if self._taker is None or value.dtype not in _FLOATS or not self._taker.put(row, value):
            return -1
        # Written out, as it is called for every value: what `_used_row` asks.
        cells, start = self._cells, row * WIDTH
        if cells[start] < 2.0 or cells[start + 1] or cells[start + 2]:
            return -1
        self._used = row + 1
        return row

    def _next_row(self) -> int:
        row = self._used
        if row == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._note_address()
        return row

    def _used_row(self, row: int) -> int:
        """A row that was just filled, if its numbers are what metrics of torch would say; else -1."""
        cells, start = self._cells, row * WIDTH
        if cells[start] < 2.0 or cells[start + 1] or cells[start + 2]:
            return -1
        self._used = row + 1
        return row

    def _measure(self, value: Tensor) -> int:
        native = self._native
        if native is None or value.dtype not in _FLOATS:
            return -1
        row = self._next_row()
        rows = self._rows  # held: another thread may make room for more while the kernel reads
        if not kernel.measure(native, self._address + row * _ROW_BYTES, value):
            return -1
        del rows
        return self._used_row(row)

    # -- numbers go out -----------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether nothing was measured since the last `finish` or `drain`."""
        return not (self._bounds or self._results or self._norms or self._added)

    def drain(self, storage: StorageManager, step: int) -> None:
        """Hand everything over as it would have been logged one by one."""
        if self._bounds:
            layout = _Layout(self._bounds, self._bound_rows)
            for metric, scalar, number in zip(
                layout.metrics, layout.scalar, self._evaluate(layout).tolist(), strict=True
            ):
                if scalar:
                    storage.log_scalar(step, metric.key, number)
                else:
                    storage.log_tensor(
                        step,
                        metric.key,
                        torch.tensor([number], dtype=torch.float64).float(),
                        metric.aggregate,
                    )
        for bounds, norms in self._norms:
            for bound, norm in zip(bounds, norms.tolist(), strict=True):
                for metric in bound.read:
                    storage.log_scalar(step, metric.key, norm)
        for key, mean, count in self._means_of_added():
            storage.log_tensor(step, key, torch.tensor(mean, dtype=torch.float64).expand(int(count)))
        for bound, metric, result in self._results:
            if bound.scalar:
                storage.log_scalar(step, metric.key, result)
            else:
                storage.log_tensor(step, metric.key, result, metric.aggregate)
        self._forget()

    def finish(self, storage: StorageManager, step: int, into: dict[str, object]) -> None:
        """Put the step's numbers into ``into``; what needs aggregating of its own goes through the storage."""
        layout = self._current_layout()
        norms = self._norms_by_key()
        if norms is None or self._needs_care(layout, into, norms):
            self.drain(storage, step)
            return
        into.update(zip(layout.keys, layout.averaged(self._evaluate(layout)).tolist(), strict=True))
        into.update(norms)
        for keys, totals, counts in self._added:
            into.update(zip(keys, (totals / counts).tolist(), strict=True))
        if self._results:
            called = [metric.key for _, metric, _ in self._results]
            into.update(zip(called, means([[result] for _, _, result in self._results]), strict=True))
        self._forget()

    def _means_of_added(self) -> Iterator[tuple[str, float, float]]:
        """What was added under each key, and over how many numbers."""
        for keys, totals, counts in self._added:
            yield from zip(keys, (totals / counts).tolist(), counts.tolist(), strict=True)

    def _norms_by_key(self) -> dict[str, float] | None:
        """The norms that came in batches, read together; None where a key came more than once."""
        found: dict[str, float] = {}
        count = 0
        by_device: dict[torch.device, list[tuple[list[BoundMetrics], Tensor]]] = {}
        for bounds, norms in self._norms:
            by_device.setdefault(norms.device, []).append((bounds, norms))
        for batches in by_device.values():
            joined = torch.cat([norms.to(torch.float64) for _, norms in batches]).tolist()
            metrics = [bound.read for bounds, _ in batches for bound in bounds]
            for wanted, norm in zip(metrics, joined, strict=True):
                for metric in wanted:
                    found[metric.key] = norm
                    count += 1
        return found if count == len(found) else None

    def _current_layout(self) -> _Layout:
        """How the rows become numbers: the same from step to step as long as the same values arrive."""
        layout = self._layout
        if layout is None or layout.rows != self._bound_rows or layout.bounds != self._bounds:
            layout = self._layout = _Layout(list(self._bounds), list(self._bound_rows))
        return layout

    def _needs_care(self, layout: _Layout, into: dict[str, object], norms: dict[str, float]) -> bool:
        """Whether a key has several sources, or an aggregation of its own."""
        metrics = [metric for _, metric, _ in self._results]
        if not layout.plain or any(metric.aggregate is not None for metric in metrics):
            return True
        if len(self._added) == 1 and not (into or layout.keys or norms or metrics):
            return False
        added = [keys for keys, _, _ in self._added]
        sources = [into, layout.keys, norms, *added, [metric.key for metric in metrics]]
        return len(set().union(*sources)) < sum(map(len, sources))

    def _evaluate(self, layout: _Layout) -> npt.NDArray[np.float64]:
        """The number of each metric of the layout."""
        if not layout.metrics:
            return np.empty(0)
        columns = self._rows[: self._used].T
        with np.errstate(all="ignore"):
            table = np.stack([formula(columns) for formula in layout.formulas])
        return table[layout.formula_index, layout.row_index]

    def _forget(self) -> None:
        self._bounds.clear()
        self._bound_rows.clear()
        self._results.clear()
        self._norms.clear()
        self._added = []
        self._used = 0
        self._recent.forget()
        if self._taker is not None:
            self._taker.forget()


@final
class _Layout:
    """Which formula of which row is which key's number."""

    __slots__ = (
        "_groups",
        "_repeated",
        "bounds",
        "formula_index",
        "formulas",
        "keys",
        "metrics",
        "plain",
        "row_index",
        "rows",
        "scalar",
    )

    def __init__(self, bounds: list[BoundMetrics], rows: list[int]) -> None:
        self.bounds, self.rows = bounds, rows
        self.formulas: list[Formula] = []
        places: dict[int, int] = {}  # id of a formula -> its place; the metrics keep them alive
        self.metrics: list[PlacedMetric] = []
        self.scalar: list[bool] = []
        formula_index: list[int] = []
        row_index: list[int] = []
        for bound, row in zip(bounds, rows, strict=True):
            for metric in bound.read:
                formula = metric.reading.formula
                assert formula is not None
                if id(formula) not in places:
                    places[id(formula)] = len(self.formulas)
                    self.formulas.append(formula)
                self.metrics.append(metric)
                self.scalar.append(bound.scalar)
                formula_index.append(places[id(formula)])
                row_index.append(row)
        positions: dict[str, int] = {}
        groups = [positions.setdefault(metric.key, len(positions)) for metric in self.metrics]
        self.keys = list(positions)
        self._repeated = len(self.keys) < len(groups)
        self._groups: npt.NDArray[np.intp] = np.array(groups, dtype=np.intp)
        self.formula_index: npt.NDArray[np.intp] = np.array(formula_index, dtype=np.intp)
        self.row_index: npt.NDArray[np.intp] = np.array(row_index, dtype=np.intp)
        self.plain = all(metric.aggregate is None for metric in self.metrics)

    def averaged(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """One number for each key: the mean over its calls."""
        if not self._repeated:
            return numbers
        return np.bincount(self._groups, weights=numbers) / np.bincount(self._groups)


def _alike(
    bounds: list[BoundMetrics], values: list[Tensor]
) -> Iterable[tuple[list[BoundMetrics], list[Tensor]]]:
    """The values of one dtype on one device together."""
    if len({(value.dtype, value.device) for value in values}) == 1:
        return [(bounds, values)]
    batches: dict[tuple[torch.dtype, torch.device], tuple[list[BoundMetrics], list[Tensor]]] = {}
    for bound, value in zip(bounds, values, strict=True):
        some, their = batches.setdefault((value.dtype, value.device), ([], []))
        some.append(bound)
        their.append(value)
    return batches.values()


def _as_tensor(result: object, values: tuple[Tensor, ...]) -> Tensor:
    """A metric's result, flat, detached, and in memory of its own."""
    if isinstance(result, Tensor):
        flat = result.detach().flatten()
        if any(flat.device == value.device and _share_memory(flat, value) for value in values):
            flat = flat.clone()
        return flat
    if isinstance(result, (bool, int, float, np.generic)):
        return torch.tensor([float(result)], dtype=torch.float64)
    raise MetricError(f"it gave {type(result).__name__} {result!r}, not a number or a tensor")


def _share_memory(left: Tensor, right: Tensor) -> bool:
    try:
        return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, functional: nothing that a view could be made of
        return False
