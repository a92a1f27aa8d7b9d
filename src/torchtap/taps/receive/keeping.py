"""Whole outputs, copied at once and booked later.

Where all that a plan asks for are outputs as they are, a look at a small model is over before anybody has asked what
came. So a hook only copies the bytes, in native code. Which call of which site it is, what it is called, who wants it
and what tensor it makes is found out when somebody looks; in the same order and by the same code as for a value that is
folded when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor

from torchtap.plan import Port
from torchtap.reduce.kernel import DTYPES, make_keeper
from torchtap.taps.receive.entries import LivePort
from torchtap.taps.receive.folding import Folding

__all__ = ["HearAt", "Kept", "Lender", "make_kept", "tensor_over"]

# Given who listens, a stop and what the module returned: whether a copy is kept. False: nothing was done. A stop is a
# port's number and the module's path.
HearAt: TypeAlias = Callable[[Any, tuple[int, str], object], bool]


class Lender(Protocol):
    """Has memory for large values, and copies what is not kept here."""

    def lend(self, nbytes: int) -> Any:
        """A buffer of at least so many bytes, aligned as torch's are; None where there is none."""

    def give_back(self, buffer: Any) -> None:
        """Nobody looks at it any more. Any thread may say so, at any moment."""

    def copy(self, value: Tensor) -> Tensor:
        """A copy on the host."""


def make_kept(lender: Lender) -> Kept | None:
    """Where whole outputs wait; None without native code to copy them."""
    keeper = make_keeper(lender.lend, lender.give_back)
    return None if keeper is None else Kept(keeper)


@final
class Kept:
    """Copies in the order in which the values came. Any thread may add one."""

    __slots__ = ("_keeper", "hear")

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper
        self.hear: HearAt = keeper.hear

    @property
    def waiting(self) -> list[tuple[int, int, Any]]:
        """A port's number, the pass and the copy of all that came and was not booked."""
        waiting: list[tuple[int, int, Any]] = self._keeper.waiting
        return waiting

    def forget(self) -> None:
        """Recognise none of the values that came."""
        self._keeper.forget()

    def book(self, folding: Folding, ports: Sequence[LivePort]) -> None:
        """Have entries for all that came."""
        with folding.lock:
            tensors: dict[int, Tensor] = {}  # one for all places that showed the same value
            for number, pass_number, copied in self._keeper.drain():
                port = ports[number]
                entry = folding.entry(port, "", port.next_call(pass_number))
                if entry is not None:
                    tensor = tensors.get(id(copied))
                    if tensor is None:
                        tensor = tensors[id(copied)] = tensor_over(copied)
                    folding.fold_copy(entry, tensor)

    def strike_off(self, taps: set[int], ports: Sequence[Port]) -> None:
        """Leave only those of the taps for which nothing waits."""
        for number, _, _ in self.waiting:
            taps.difference_update(ports[number].taps)
            if not taps:
                return


def tensor_over(copied: Any) -> Tensor:
    """A tensor whose memory is the copy's, and which holds it."""
    return torch.frombuffer(copied, dtype=DTYPES[copied.dtype]).view(copied.shape)
