"""Whole outputs, copied at once and booked later.

Where all that a plan asks for are outputs as they are, a look at a small model is over before anybody has asked what
came. So a hook only makes the copy. Which call of which site it is, what it is called and who wants it is found out
when somebody looks; in the same order and by the same code as for a value that is folded when it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

from torchtap.plan import Port
from torchtap.reduce.kernel import make_copier
from torchtap.taps.receive.entries import LivePort
from torchtap.taps.receive.folding import Folding

__all__ = ["Kept", "make_kept"]


def make_kept() -> Kept | None:
    """Where whole outputs wait; None without native code to copy them."""
    copier = make_copier()
    return None if copier is None else Kept(copier)


@final
class Kept:
    """Copies in the order in which the values came. Any thread may add one."""

    __slots__ = ("_forget", "copy", "waiting")

    def __init__(self, copier: Any) -> None:
        # A copy of a small value, or None for what is to be taken in the ordinary way.
        self.copy: Callable[[object], Tensor | None] = copier.copy
        self._forget: Callable[[], None] = copier.forget
        self.waiting: deque[tuple[int, int, Tensor]] = deque()  # a port's number, the pass, a copy

    def forget(self) -> None:
        """Recognise none of the values that came."""
        self._forget()

    def book(self, folding: Folding, ports: Sequence[LivePort]) -> None:
        """Have entries for all that came."""
        with folding.lock:
            while self.waiting:
                number, pass_number, copy = self.waiting.popleft()
                port = ports[number]
                entry = folding.entry(port, "", port.next_call(pass_number))
                if entry is not None:
                    folding.fold_copy(entry, copy)

    def strike_off(self, taps: set[int], ports: Sequence[Port]) -> None:
        """Leave only those of the taps for which nothing waits."""
        for number, _, _ in tuple(self.waiting):
            taps.difference_update(ports[number].taps)
            if not taps:
                return
