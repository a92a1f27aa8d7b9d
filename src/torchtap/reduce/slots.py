"""States that lie on a device until the host asks for them: two sets of slots in turn.

While one set is on its way to the host, the next step's states go into the other. It guarantees that a set is not
written again before what was in it has arrived. Memory is made in pieces and kept from step to step.

Not here: how it travels (`crossing`), what a row is (`stats_block`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtap.reduce.crossing import Crossing
from torchtap.reduce.moments import WIDTH

__all__ = ["DeviceSlots", "SlotSet"]


@final
class SlotSet:
    """One set of slots, and which row of statistics each is to be folded into."""

    _PIECE = 1024

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.booked: list[tuple[int, int]] = []  # (row, slot), in the order of arrival
        self.used = 0
        self._pieces: list[Tensor] = []
        self._crossing: Crossing | None = None

    def slot(self, number: int) -> Tensor:
        """The memory of a slot that is in use, or of the next one."""
        piece, place = divmod(number, self._PIECE)
        if piece == len(self._pieces):
            dtype = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
            with torch.inference_mode(False):  # later steps write here outside of it
                self._pieces.append(torch.empty(self._PIECE, WIDTH, dtype=dtype, device=self.device))
        return self._pieces[piece][place]

    def add(self, state: Tensor) -> int:
        """The number of the slot in which this state is from now on; it may have been written there already."""
        number = self.used
        slot = self.slot(number)
        if slot.data_ptr() != state.data_ptr():
            slot.copy_(state, non_blocking=True)
        self.used = number + 1
        return number

    def send(self) -> None:
        """Begin to bring everything to the host."""
        whole, rest = divmod(self.used, self._PIECE)
        sources = self._pieces[:whole]
        self._crossing = Crossing([*sources, self._pieces[whole][:rest]] if rest else sources)

    def arrived(self) -> bool:
        """Whether all of it is on the host."""
        return self._crossing is None or self._crossing.done()

    def receive(self) -> tuple[npt.NDArray[np.float64], list[tuple[int, int]]]:
        """The states by slot, and what was booked; the set is empty then."""
        assert self._crossing is not None, "send comes first"
        host = torch.cat(self._crossing.wait()).to(torch.float64).numpy()
        booked, self.booked = self.booked, []
        self.used, self._crossing = 0, None
        return host, booked


@final
class DeviceSlots:
    """The two sets of one device."""

    def __init__(self, device: torch.device) -> None:
        self.current = SlotSet(device)
        self._other = SlotSet(device)
        self._receive_other: Callable[[], object] | None = None

    def turn(self, receive: Callable[[], object]) -> SlotSet:
        """Send the current set off and take up the other. ``receive`` is how the one that was sent is emptied."""
        self.current.send()
        if self._receive_other is not None:
            self._receive_other()
        self._receive_other = receive
        self.current, self._other = self._other, self.current
        return self._other
