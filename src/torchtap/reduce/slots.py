"""Statistics of values on a device, measured there without a wait and brought to the host in one copy per step.

Small values are first put side by side into a stage: one launch each, and one more if the row's padding changes. 14
launches measure everything in the stage, row by row: when it is full, and at the end of a step that leaves at least 14
values there. Fewer wait for those of the next steps. So a value takes at most 3 launches, and 14 for each 2**20
elements.
Values that the Triton kernel reads take its one or two launches instead (`device_kernel`). It guarantees:
- nothing depends on the data but the numbers: equal steps make equal launches at equal addresses;
- the same memory serves every step. The copy runs on the stream that writes the next step's numbers, in order; a change
  of streams is ordered by an event.

Squares of float64 beyond 1e154 overflow, and int64 beyond 2**53 is rounded.

Not here: how numbers travel (`device_copy`), which row of statistics they belong to (`stats`).
"""

from __future__ import annotations

import threading
from typing import final
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtap.reduce import device_kernel
from torchtap.reduce.device_copy import Crossing, line_to
from torchtap.reduce.moments import WIDTH, blank_states

__all__ = ["DeviceSlots", "Measured", "Round", "slots_on"]

_ROW = 2048  # elements
_ROWS = 512
_COLUMNS = 9  # finite, nans, others than zero, l1, sum, center, low, high, root of squares around the center
_NARROW = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.uint8, torch.bool}
)
_FEW = 14  # values for which a measurement is put off
_MOST = 1 << 19  # numbers that a device holds (4 MiB) before they are sent, within a step too
States = npt.NDArray[np.float64]


@final
class Round:
    """The numbers of one step, or of a part of it, on their way to the host."""

    def __init__(self, slots: DeviceSlots) -> None:
        self._slots = slots
        self._crossing: Crossing | None = None
        self._measured: dict[int, States] = {}

    def hand_over(self) -> None:
        """Have the numbers on their way, or let a few values wait for more."""
        if self._crossing is None:
            self._slots.end_step()

    def send(self, numbers: Tensor) -> None:
        """Start the copy."""
        self._crossing = Crossing([numbers], beside=False)

    def done(self) -> bool:
        """Return True if the numbers are on the host."""
        return self._crossing is not None and self._crossing.done()

    def numbers(self) -> States:
        """Return the numbers; waits for them."""
        if self._crossing is None:
            self._slots.send()
        assert self._crossing is not None
        return self._crossing.wait()[0].to(torch.float64).numpy()

    def rows(self, at: int, count: int) -> States:
        """Return the states of the rows of a stage whose numbers are at this place."""
        states = self._measured.get(at)
        if states is None:
            columns = self.numbers()[at : at + _COLUMNS * count].reshape(_COLUMNS, count)
            states = self._measured[at] = _states_of(columns)
        return states


def _states_of(columns: States) -> States:
    """Return the states of rows that are full, from what the device has measured."""
    finite, nans, others, l1, total, center, low, high, root = columns
    states = blank_states(columns.shape[1])
    with np.errstate(all="ignore"):
        mean = total / finite
        deviation = np.sqrt(np.maximum(root * root / finite - (mean - center) ** 2, 0))
    same = low == high  # a constant is its own mean, to the last bit
    states[:, 0] = _ROW
    states[:, 1], states[:, 2], states[:, 3] = nans, _ROW - nans - finite, _ROW - others
    some = finite > 0
    for column, values in ((4, np.where(same, low, mean)), (5, np.where(same, 0.0, deviation))):
        states[some, column] = values[some]
    states[some, 6], states[some, 7] = low[some], high[some]
    states[:, 8] = l1
    return states


@final
class Measured:
    """Where the state of one value will be."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: list[tuple[Round, _Flush | None, int, int, int]] = []

    def states(self) -> States:
        """Return the states of the value's pieces. Waits for them."""
        found = []
        for sent, flush, first, count, elements in self.pieces:
            numbers = sent.numbers()  # sends them if that was put off
            if flush is None:
                found.append(numbers[first : first + WIDTH].reshape(1, WIDTH))
                continue
            states = sent.rows(flush.at, flush.rows)[first : first + count].copy()
            padded = count * _ROW - elements  # the end of the last row holds NaN
            states[-1, :2] -= padded
            found.append(states)
        return np.concatenate(found) if found else blank_states(1)


@final
class _Flush:
    """A full stage: where its numbers are."""

    __slots__ = ("at", "rows")

    def __init__(self) -> None:
        self.at, self.rows = -1, 0


@final
class _Stage:
    """Rows of one dtype in which values lie side by side until they are measured."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):  # later steps write here outside of it
            self.rows = torch.empty(_ROWS, _ROW, dtype=dtype, device=device)
        self._flat = self.rows.view(-1)
        self._nan_from = np.full(_ROWS, _ROW)  # of each row: from here on it holds NaN
        self.used = 0
        self.flush = _Flush()

    @property
    def room(self) -> int:
        """How many elements still fit."""
        return (_ROWS - self.used) * _ROW

    def put(self, value: Tensor) -> tuple[_Flush, int, int, int]:
        """Copy a value that fits."""
        elements, first = value.numel(), self.used
        count = -(-elements // _ROW)
        at = first * _ROW
        last, end = first + count - 1, elements - (count - 1) * _ROW
        before = int(self._nan_from[last])
        self._nan_from[first : last + 1] = _ROW  # also if a launch fails
        self._flat[at : at + elements].view(value.shape).copy_(value)
        if end < before:
            self._flat[last * _ROW + end : last * _ROW + before].fill_(torch.nan)
        self._nan_from[last] = end
        self.used = first + count
        return self.flush, first, count, elements

    def measure(self, numbers: Tensor, at: int) -> int:
        """Write the numbers of all rows in use to ``numbers``, from ``at`` on, and empty the stage; return how many."""
        rows, wide = self.rows[: self.used], numbers.dtype
        size = _COLUMNS * self.used
        column = numbers[at : at + size].view(_COLUMNS, self.used).unbind()
        finite = (rows - rows) == 0
        torch.sum(finite, 1, dtype=wide, out=column[0])
        torch.sum(rows != rows, 1, dtype=wide, out=column[1])
        torch.linalg.vector_norm(rows, 0, 1, dtype=wide, out=column[2])
        clean = torch.nan_to_num(rows, 0.0, 0.0, 0.0)
        torch.linalg.vector_norm(clean, 1, 1, dtype=wide, out=column[3])
        torch.sum(clean, 1, dtype=wide, out=column[4])
        del clean
        center = torch.div(column[4], column[0], out=column[5]).unsqueeze(1)
        filled = torch.where(finite, rows, center)
        torch.aminmax(filled, dim=1, out=(column[6], column[7]))
        torch.linalg.vector_norm(filled.sub_(center), 2, 1, dtype=wide, out=column[8])
        self.flush.at, self.flush.rows = at, self.used
        self.flush, self.used = _Flush(), 0
        return size


@final
class DeviceSlots:
    """The numbers of one device, and the stages that lead to them. One for all blocks and threads (`slots_on`)."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        self._line = line_to(device)
        with torch.inference_mode(False):
            self._numbers = torch.empty(1 << 12, dtype=self._line.wide, device=device)
        self._used = 0
        self._stages: dict[torch.dtype, _Stage] = {}
        self._staged = 0  # values of this round that are in a stage
        self._stream: torch.Stream | None = None  # the last that wrote here
        self._round = Round(self)

    @torch.no_grad()
    def measure(self, value: Tensor) -> Measured:
        """Measure a plain dense tensor of the device."""
        with self._lock:
            return self._measure(value)

    def _measure(self, value: Tensor) -> Measured:
        self._take_stream()
        if device_kernel.reads(value):
            slot = self._slot()
            if device_kernel.measure(slot, value):
                return self._written()
        measured = Measured()
        dtype = torch.float32 if value.dtype in _NARROW else self._line.wide
        stage = self._stages.get(dtype)
        if stage is None:
            stage = self._stages[dtype] = _Stage(dtype, value.device)
        pieces = (value,) if value.numel() <= _ROWS * _ROW else value.reshape(-1).split(_ROWS * _ROW)
        for piece in pieces:
            if not piece.numel():
                continue
            if piece.numel() > stage.room:
                self._measure_stage(stage)
            measured.pieces.append((self._round, *stage.put(piece)))
        self._staged += 1
        return measured

    @torch.no_grad()
    def add(self, state: Tensor) -> Measured:
        """Add a state that was computed on the device."""
        with self._lock:
            self._take_stream()
            self._slot().copy_(state)
            return self._written()

    def end_step(self) -> None:
        """Send the numbers of a step, unless few values are staged: they wait for those of the next steps."""
        with self._lock:
            if not (self._line.asynchronous and 0 < self._staged < _FEW):
                self.send()

    def send(self) -> None:
        """Start to copy everything to the host; what comes afterwards belongs to the next round."""
        with self._lock:
            self._take_stream()
            self._send()

    def _slot(self) -> Tensor:
        self._reserve(WIDTH)
        return self._numbers[self._used : self._used + WIDTH]

    def _written(self) -> Measured:
        measured = Measured()
        measured.pieces.append((self._round, None, self._used, 1, 0))
        self._used += WIDTH
        return measured

    @torch.no_grad()
    def _measure_stage(self, stage: _Stage) -> None:
        self._reserve(_COLUMNS * stage.used)
        self._used += stage.measure(self._numbers, self._used)

    def _reserve(self, size: int) -> None:
        """Grow the memory if it is too small. More than `_MOST` numbers are sent before the step ends."""
        needed = self._used + size
        if needed <= len(self._numbers):
            return
        with torch.inference_mode(False):
            larger = self._numbers.new_empty(max(needed, 2 * len(self._numbers)))
        larger[: self._used].copy_(self._numbers[: self._used])
        self._numbers = larger

    @torch.no_grad()
    def _send(self) -> None:
        for stage in self._stages.values():
            if stage.used:
                self._measure_stage(stage)
        self._round.send(self._numbers[: self._used])
        self._round, self._used, self._staged = Round(self), 0, 0

    def _take_stream(self) -> None:
        """Order what comes now after everything that was done here on another stream."""
        if self._line.asynchronous:
            stream = self._line.current()
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
                for memory in (self._numbers, *(stage.rows for stage in self._stages.values())):
                    memory.record_stream(stream)  # it may be released before this stream is done with it
            self._stream = stream
        if self._used >= _MOST:
            self._send()


_known: WeakValueDictionary[torch.device, DeviceSlots] = WeakValueDictionary()


def slots_on(device: torch.device) -> DeviceSlots:
    """Return the slots of a device; their memory is released with the last block that uses them."""
    found = _known.get(device)
    return _known.setdefault(device, DeviceSlots(device)) if found is None else found
