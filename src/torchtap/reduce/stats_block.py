"""Statistics of many sites at once: one row of numbers for each, filled without waiting for any device.

``measure`` reads a value once into a scratch slot, ``fold`` merges that slot into a row; a value that is seen
at several sites is measured once and folded several times. It guarantees:
- a CPU value is read where it lies, by the native kernel where there is one;
- a value on another device is measured there, into a preallocated slot; all slots come to the host in one copy, for
  which ``results`` waits and ``hand_over`` does not;
- rows hold what `moments` defines, so that they merge over ranks through ``states`` and ``load``.

Not thread-safe: whoever shares a block between threads brings the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtap.reduce import kernel
from torchtap.reduce.measuring import measure
from torchtap.reduce.moments import STATISTICS, WIDTH, blank_states, finish, merge_states
from torchtap.reduce.slots import DeviceSlots, SlotSet
from torchtap.reduce.transforms import outside_transforms

__all__ = ["StatsArrival", "StatsBlock"]

_ROW_BYTES = WIDTH * 8
# A step of more values than this waits for the device in between, so that memory has a bound (4.5 MiB).
_MOST_SLOTS = 1 << 16
_read_by_kernel = kernel.measure
# A checkout may still hold the build of an older source, without these.
_finish = getattr(kernel.native, "finish_rows", None)
_blank = getattr(kernel.native, "blank_rows", None)


@final
class StatsBlock:
    """Rows of statistics. ``device`` is where most values are expected: its slots are made at once."""

    statistics: ClassVar[tuple[str, ...]] = STATISTICS

    def __init__(self, rows: int, *, scratch: int = 8, device: torch.device | str = "cpu") -> None:
        self._native = kernel.native
        self._rows = blank_states(rows)
        self._scratch = blank_states(scratch)
        # Where a scratch slot's state is as long as it has not come to the host; None when it is in
        # `_scratch`.
        self._remote: list[tuple[SlotSet, int] | None] = [None] * scratch
        self._slots: dict[torch.device, DeviceSlots] = {}
        self._taker = kernel.make_taker()
        if self._taker is not None:  # a call less for each value
            self.take = self._taker.take  # type: ignore[method-assign]
        self._note_addresses()
        place = torch.device(device)
        if place.type not in ("cpu", "meta"):
            self._slots_on(torch.empty(0, device=place).device)

    def __len__(self) -> int:
        return len(self._rows)

    def measure(self, scratch: int, value: Tensor) -> None:
        """Read ``value`` once into scratch slot ``scratch``."""
        native = self._native
        if native is not None and _read_by_kernel(
            native, self._scratch_address + scratch * _ROW_BYTES, value
        ):
            self._remote[scratch] = None
        else:
            self._measure_with_care(scratch, value)

    def fold(self, row: int, scratch: int) -> None:
        """Merge a scratch slot into a row; the slot stays as it is."""
        remote = self._remote[scratch]
        if remote is not None:
            slots, slot = remote
            current = self._slots[slots.device].current
            if slots is not current:  # measured before the last hand-over: on the device it is still at hand
                slot = current.add(slots.slot(slot))
                self._remote[scratch] = (current, slot)
            current.booked.append((row, slot))
        elif self._native is not None:
            self._native.fold(
                self._row_address + row * _ROW_BYTES, self._scratch_address + scratch * _ROW_BYTES
            )
        else:
            _merge_into(self._rows, [row], self._scratch[scratch : scratch + 1])

    def measure_into(self, row: int, scratch: int, value: Tensor) -> None:
        """``measure`` and ``fold`` in one go."""
        native = self._native
        rows = self._rows  # held while the kernel lets go of the interpreter: `grow` has others
        at, state = self._row_address + row * _ROW_BYTES, self._scratch_address + scratch * _ROW_BYTES
        if native is not None and _read_by_kernel(native, state, value, row=at):
            self._remote[scratch] = None
            del rows
            return
        self._measure_with_care(scratch, value)
        self.fold(row, scratch)

    def take(self, row: int, value: Tensor) -> bool:
        """Measure a small value, or recognise it, and fold it into a row; False where that is not possible."""
        return False

    def take_any(self, row: int, value: Tensor) -> bool:
        """The same of any size. Lets other threads run while it reads a large one."""
        rows = self._rows  # held: `grow` has others
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
        """Recognise nothing that was taken until now."""
        if self._taker is not None:
            self._taker.forget()

    def fold_state(self, row: int, state: Tensor) -> None:
        """Merge a state that was computed elsewhere, such as in a compiled graph, where `measure` was not needed."""
        if state.device.type == "cpu":
            _merge_into(self._rows, [row], state.detach().to(torch.float64).reshape(1, WIDTH).numpy())
        else:
            slots, slot = self._put(state)
            slots.booked.append((row, slot))

    def grow(self, rows: int) -> None:
        """Have at least ``rows`` rows; those there are stay as they are."""
        missing = rows - len(self._rows)
        if missing > 0:
            self._rows = np.concatenate([self._rows, blank_states(missing)])
            self._note_addresses()

    def reset(self, rows: slice | None = None) -> None:
        """Back to "nothing seen", for all rows or some."""
        if self._slots:
            self._fetch()
        if rows is None and _blank is not None and self._native is not None:
            _blank(self._rows)
            return
        chosen = self._rows[rows if rows is not None else slice(None)]
        chosen[...] = blank_states(len(chosen))

    def results(self, rows: npt.NDArray[np.intp] | None = None) -> npt.NDArray[np.float64]:
        """The twelve statistics of each row, or of those given, (rows, 12), in the order of ``moments.STATISTICS``."""
        if self._slots:
            self._fetch()
        if _finish is None or self._native is None:
            return finish(self._rows if rows is None else self._rows[rows])
        made = np.empty((len(self._rows) if rows is None else len(rows), len(STATISTICS)))
        _finish(self._rows, rows, made)
        return made

    def hand_over(self) -> StatsArrival | None:
        """Send what is on other devices to the host, without waiting; None where nothing is. Rows are left as they are.

        What was sent counts in the answer's results alone, not in later ones of this block.
        """
        turning = [slots for slots in self._slots.values() if slots.current.used] if self._slots else None
        if not turning:
            return None
        arriving = StatsArrival(self._rows.copy(), self._receive)
        arriving.sets = tuple(slots.turn(arriving.results) for slots in turning)
        return arriving

    def result(self, row: int) -> npt.NDArray[np.float64]:
        """The twelve statistics of one row."""
        self._fetch()
        finished: npt.NDArray[np.float64] = finish(self._rows[row : row + 1])[0]
        return finished

    def states(self) -> npt.NDArray[np.float64]:
        """A copy of the rows' states, (rows, ``moments.WIDTH``)."""
        self._fetch()
        return self._rows.copy()

    def load(self, row: int, state: npt.NDArray[np.float64]) -> None:
        """Put a state into a row, in place of what was there."""
        self._fetch()
        self._rows[row] = state

    def _note_addresses(self) -> None:
        self._row_address = int(self._rows.ctypes.data)
        self._scratch_address = int(self._scratch.ctypes.data)
        if self._taker is not None:
            self._taker.use_rows(self._row_address, len(self._rows))

    @outside_transforms
    def _measure_with_care(self, scratch: int, value: Tensor) -> None:
        state = measure(value, self._next_slot)
        if self._native is not None and state.device.type == "cpu":
            self._scratch[scratch] = state.numpy()
            self._remote[scratch] = None
        else:
            self._remote[scratch] = self._put(state)

    def _put(self, state: Tensor) -> tuple[SlotSet, int]:
        slots = self._slots_on(state.device).current
        if slots.used >= _MOST_SLOTS:
            self._fetch()
        return slots, slots.add(state)

    def _next_slot(self, device: torch.device) -> Tensor:
        slots = self._slots_on(device).current
        return slots.slot(slots.used)

    def _slots_on(self, device: torch.device) -> DeviceSlots:
        slots = self._slots.get(device)
        if slots is None:
            slots = self._slots[device] = DeviceSlots(device)
        return slots

    def _fetch(self) -> None:
        """Bring everything that was measured elsewhere to the host and fold it: one copy for each device."""
        for slots in self._slots.values():
            if slots.current.used:
                slots.current.send()
                self._receive(self._rows, slots.current)

    @outside_transforms
    def _receive(self, rows: npt.NDArray[np.float64], slots: SlotSet) -> None:
        """Fold what a set brings into ``rows``; scratch slots that were in it are on the host then."""
        host, booked = slots.receive()
        for scratch, remote in enumerate(self._remote):
            if remote is not None and remote[0] is slots:
                self._scratch[scratch] = host[remote[1]]
                self._remote[scratch] = None
        while booked:  # one round for each time that a row occurs, in the order of arrival
            chosen: dict[int, int] = {}
            later = []
            for row, slot in booked:
                if row in chosen:
                    later.append((row, slot))
                else:
                    chosen[row] = slot
            _merge_into(rows, list(chosen), host[list(chosen.values())])
            booked = later


@final
class StatsArrival:
    """The statistics of all rows as they were at a hand-over, of which some are on their way to the host."""

    def __init__(
        self,
        rows: npt.NDArray[np.float64],
        receive: Callable[[npt.NDArray[np.float64], SlotSet], None],
    ) -> None:
        self.sets: tuple[SlotSet, ...] = ()
        self._rows = rows
        self._receive = receive

    def done(self) -> bool:
        """Whether they are there; ``results`` would not wait."""
        return all(slots.arrived() for slots in self.sets)

    def states(self) -> npt.NDArray[np.float64]:
        """The state of each row. The first call waits for them."""
        sets, self.sets = self.sets, ()
        for slots in sets:
            self._receive(self._rows, slots)
        return self._rows

    def results(self) -> npt.NDArray[np.float64]:
        """The twelve statistics of each row. The first call waits for them."""
        return finish(self.states())


def _merge_into(rows: npt.NDArray[np.float64], chosen: list[int], states: npt.NDArray[np.float64]) -> None:
    merged = merge_states(torch.from_numpy(rows[chosen]), torch.from_numpy(states))
    rows[chosen] = merged.numpy()
