"""Whole outputs, copied at once and booked later.

Where all that a plan asks for are outputs as they are, a look at a small model is over before anybody has asked what
came. So a hook only copies the bytes, in native code. Which call of which site it is, what it is called, who wants it
and what tensor it makes is found out when somebody looks; in the same order and by the same code as for a value that is
folded when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from torchtap.receive.entries import PortState
from torchtap.receive.folding import Folding
from torchtap.reduce.kernel import DTYPES, make_keeper

__all__ = ["HearAt", "Keeper", "Lender", "book", "make_kept", "tensor_over"]

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


class Keeper(Protocol):
    """Has copies in the order in which the values came. Any thread may add one. It is native code."""

    @property
    def hear(self) -> HearAt: ...

    @property
    def waiting(self) -> Sequence[tuple[int, int, Any]]:
        """A port's number, the pass and the copy of all that came and was not booked."""

    def drain(self) -> list[tuple[int, int, Any]]:
        """All that is waiting; nothing is, afterwards."""

    def forget(self) -> None:
        """Recognise none of the values that came."""


def make_kept(lender: Lender) -> Keeper | None:
    """Where whole outputs wait; None without native code to copy them."""
    return None if make_keeper is None else make_keeper(lender.lend, lender.give_back)


def book(kept: Keeper, folding: Folding, ports: Sequence[PortState]) -> None:
    """Have entries for all that came."""
    with folding.lock:
        tensors: dict[int, Tensor] = {}  # one for all places that showed the same value
        for number, pass_number, copied in kept.drain():
            port = ports[number]
            entry = folding.entry(port, "", port.next_call(pass_number))
            if entry is not None:
                tensor = tensors.get(id(copied))
                if tensor is None:
                    tensor = tensors[id(copied)] = tensor_over(copied)
                folding.fold_copy(entry, tensor)


def tensor_over(copied: Any) -> Tensor:
    """A tensor whose memory is the copy's, and which holds it."""
    return torch.frombuffer(copied, dtype=DTYPES[copied.dtype]).view(copied.shape)
