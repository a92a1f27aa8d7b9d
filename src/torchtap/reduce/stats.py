"""``Stats``: twelve statistics from one read of each value; and the rows that hold them for many sites.

`StatsBlock` has one row for each site. It guarantees:
- a CPU value is read in place, by the native kernel if it was built;
- a value on another device is measured there, into a preallocated slot. All slots are copied to the host at once;
  ``results`` waits for the copy and ``hand_over`` does not;
- rows merge over ranks: a row is a state of `moments`.

Moments, extremes and norms are of the finite values; NaN and infinities are counted. Complex values count by their
magnitude. Not thread-safe: callers that share a block must hold a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtap.reduce import device_kernel, kernel
from torchtap.reduce.densify import PLAIN_TYPES, densify_real, holds_values
from torchtap.reduce.moments import STATISTICS, WIDTH, blank_states, finish, measure_with_torch, merge_states
from torchtap.reduce.reduction import Reduction, Result, outside_transforms
from torchtap.reduce.slots import DeviceSlots, Measured, Round, slots_on

__all__ = ["Stats", "StatsArrival", "StatsBlock", "measure"]

_ROW_BYTES = WIDTH * 8
States = npt.NDArray[np.float64]


@outside_transforms
def measure(value: Tensor) -> Tensor:
    """Return the state of any tensor, on its device.

    Sparse tensors are measured by their stored values; the zeros they leave out are added to the counts.
    """
    if (
        type(value) in PLAIN_TYPES
        and not value.is_mkldnn
        and value.layout is not torch.strided
        and holds_values(value)
    ):
        return _measure_sparse(value.detach())
    plain = densify_real(value)
    if kernel.native is not None:
        state = torch.empty(WIDTH, dtype=torch.float64)
        if kernel.measure(kernel.native, state.data_ptr(), plain):
            return state
    if device_kernel.reads(plain):
        state = torch.empty(WIDTH, dtype=torch.float64, device=plain.device)
        if device_kernel.measure(state, plain):
            return state
    return measure_with_torch(plain)


def _measure_sparse(value: Tensor) -> Tensor:
    stored = value.coalesce().values() if value.layout is torch.sparse_coo else value.values()
    state = measure(stored)
    missing = value.numel() - stored.numel()
    if missing <= 0:
        return state
    zeros = torch.tensor([missing, 0, 0, missing, 0, 0, 0, 0, 0, 0], dtype=state.dtype, device=state.device)
    return merge_states(state, zeros)


@final
class StatsBlock:
    """Rows of statistics, and scratch slots.

    A value is measured into a scratch slot and folded into a row. A second site that shows the same value folds the
    slot again. ``take`` and its like do both in native code, and recognise repeated values themselves.

    device: the device of most values; its slots are allocated at once.
    """

    statistics: ClassVar[tuple[str, ...]] = STATISTICS

    def __init__(self, rows: int, *, scratch: int = 8, device: torch.device | str = "cpu") -> None:
        self._native = kernel.native
        self._rows = blank_states(rows)
        self._scratch = blank_states(scratch)
        # Where a scratch slot's state is on a device; None if it is in `_scratch`.
        self._remote: list[Measured | None] = [None] * scratch
        self._booked: list[tuple[int, Measured]] = []  # rows, and the states that are to be folded into them
        self._slots: dict[torch.device, DeviceSlots] = {}
        self._taker = kernel.make_taker()
        if self._taker is not None:  # saves one call for each value
            self.take, self.forget = self._taker.take, self._taker.forget  # type: ignore[method-assign]
        self._note_addresses()
        place = torch.device(device)
        if place.type not in ("cpu", "meta"):
            self._slots_on(torch.empty(0, device=place).device)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, row: int, value: Tensor) -> bool:
        """Fold a small value into a row, atomically. Return False if nothing was done."""
        return False

    def take_any(self, row: int, value: Tensor) -> bool:
        """Do the same for any size. Other threads may run while a large value is read."""
        rows = self._rows  # held: `grow` replaces it
        taken = self._taker is not None and self._taker.take_any(row, value, torch.get_num_threads())
        del rows
        return bool(taken)

    def put_each(self, rows: list[int], values: list[Tensor]) -> Sequence[int]:
        """Replace rows by the statistics of small values. Return the positions of the values that are left."""
        if self._taker is None:
            return range(len(rows))
        left: list[int] = self._taker.put_each(rows, values)
        return left

    def forget(self) -> None:
        """Recognise none of the values that were taken so far."""

    def measure_into(self, row: int, scratch: int, value: Tensor) -> None:
        """Measure a value into a scratch slot and fold the slot into a row."""
        state = self._scratch_address + scratch * _ROW_BYTES
        if self._native is not None and kernel.measure(self._native, state, value):
            self._remote[scratch] = None
        else:
            self._measure_any(scratch, value)
        self.fold(row, scratch)

    def fold(self, row: int, scratch: int) -> None:
        """Merge a scratch slot into a row; the slot does not change."""
        remote = self._remote[scratch]
        if remote is not None:
            self._booked.append((row, remote))
        elif self._native is not None:
            self._native.fold(
                self._row_address + row * _ROW_BYTES, self._scratch_address + scratch * _ROW_BYTES
            )
        else:
            _merge_into(self._rows, [row], self._scratch[scratch : scratch + 1])

    def fold_state(self, row: int, state: Tensor) -> None:
        """Merge a state that was computed elsewhere, such as in a compiled graph, into a row."""
        if state.device.type == "cpu":
            _merge_into(self._rows, [row], state.detach().to(torch.float64).reshape(1, WIDTH).numpy())
        else:
            self._booked.append((row, self._slots_on(state.device).add(state)))

    def grow(self, rows: int) -> None:
        """Grow to at least ``rows`` rows; existing rows do not change."""
        missing = rows - len(self._rows)
        if missing > 0:
            self._rows = np.concatenate([self._rows, blank_states(missing)])
            self._note_addresses()

    def reset(self, rows: slice | None = None) -> None:
        """Make all rows, or some, empty."""
        every = range(len(self._rows))[rows if rows is not None else slice(None)]
        self._booked = [each for each in self._booked if each[0] not in every]
        if rows is None and self._native is not None:
            self._native.blank_rows(self._rows)
            return
        chosen = self._rows[rows if rows is not None else slice(None)]
        chosen[...] = blank_states(len(chosen))

    def results(self, rows: npt.NDArray[np.intp] | None = None) -> States:
        """Return the twelve statistics of all rows, or of some, in the order of ``STATISTICS``."""
        if self._booked:
            self._fetch()
        if self._native is None:
            return finish(self._rows if rows is None else self._rows[rows])
        made = np.empty((len(self._rows) if rows is None else len(rows), len(STATISTICS)))
        self._native.finish_rows(self._rows, rows, made)
        return made

    def states(self) -> States:
        """Return a copy of the rows' states, (rows, ``WIDTH``)."""
        self._fetch()
        return self._rows.copy()

    def hand_over(self) -> StatsArrival | None:
        """Start to copy the states on other devices to the host; None if there are none. Rows do not change.

        The copied states count in the returned object's results, and not in later results of this block.
        """
        if not self._booked:
            return None
        booked, self._booked = self._booked, []
        rounds = {piece[0] for _, measured in booked for piece in measured.pieces}
        for each in rounds:
            each.hand_over()
        return StatsArrival(self._rows.copy(), booked, list(rounds))

    def _note_addresses(self) -> None:
        self._row_address = int(self._rows.ctypes.data)
        self._scratch_address = int(self._scratch.ctypes.data)
        if self._taker is not None:
            self._taker.use_rows(self._row_address, len(self._rows))

    @outside_transforms
    def _measure_any(self, scratch: int, value: Tensor) -> None:
        self._remote[scratch] = None
        if not value.is_cpu and value.layout is torch.strided:
            plain = densify_real(value)
            if not plain.is_cpu:
                self._remote[scratch] = self._slots_on(plain.device).measure(plain)
                return
            value = plain
        state = measure(value)
        if state.is_cpu:
            self._scratch[scratch] = state.numpy()
        else:
            self._remote[scratch] = self._slots_on(state.device).add(state)

    def _slots_on(self, device: torch.device) -> DeviceSlots:
        slots = self._slots.get(device)
        if slots is None:
            slots = self._slots[device] = slots_on(device)
        return slots

    def _fetch(self) -> None:
        """Copy all states on other devices to the host and fold them: one copy for each device."""
        arriving = self.hand_over()
        if arriving is not None:
            self._rows[...] = arriving.states()


@final
class StatsArrival:
    """The statistics of all rows at a hand-over, while some of them are copied to the host."""

    def __init__(self, rows: States, booked: list[tuple[int, Measured]], rounds: list[Round]) -> None:
        self._rows = rows
        self._booked = booked
        self._rounds = rounds

    def done(self) -> bool:
        """Return True if ``results`` would not wait."""
        return all(each.done() for each in self._rounds)

    def results(self) -> States:
        """Return the twelve statistics of each row. The first call waits for them."""
        return finish(self.states())

    @outside_transforms
    def states(self) -> States:
        """Return the state of each row. The first call waits for them."""
        booked, self._booked, self._rounds = self._booked, [], []
        if booked:
            found = [measured.states() for _, measured in booked]
            rows = np.repeat([row for row, _ in booked], [len(each) for each in found])
            rows, states = _merge_equal(rows, np.concatenate(found))
            _merge_into(self._rows, rows.tolist(), states)
        return self._rows


def _merge_equal(rows: npt.NDArray[np.intp], states: States) -> tuple[npt.NDArray[np.intp], States]:
    """Merge the states of each row into one, pair by pair."""
    order = np.argsort(rows, kind="stable")
    rows, states = rows[order], states[order]
    while len(rows) > 1:
        place = np.arange(len(rows)) - np.searchsorted(rows, rows)  # within its row
        second = np.flatnonzero(place % 2)
        if not len(second):
            break
        states[second - 1] = merge_states(
            torch.from_numpy(states[second - 1]), torch.from_numpy(states[second])
        ).numpy()
        rows, states = np.delete(rows, second), np.delete(states, second, 0)
    return rows, states


@outside_transforms
def _merge_into(rows: States, chosen: list[int], states: States) -> None:
    rows[chosen] = merge_states(torch.from_numpy(rows[chosen]), torch.from_numpy(states)).numpy()


@final
@dataclass(frozen=True)
class Stats(Reduction[Tensor]):
    """Count, mean, std, min, max, absmax, l1, l2, rms, share of zeros, NaN and inf counts."""

    name: ClassVar[str] = "stats"
    elementwise: ClassVar[bool] = True
    in_rows: ClassVar[bool] = True

    @outside_transforms
    def update(self, state: Tensor | None, value: Tensor) -> Tensor:
        seen = measure(value)
        return seen if state is None else merge_states(state, seen.to(state.device))

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        return merge_states(left, right.to(left.device))

    def result(self, state: Tensor) -> Result:
        numbers = finish(state.to("cpu").to(torch.float64).reshape(1, WIDTH).numpy())[0]
        return dict(zip(STATISTICS, numbers.tolist(), strict=True))

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name}
