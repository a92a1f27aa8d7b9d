"""Ways from what graphs emit to the receivers in this process. Apart from the op, which only a graph needs."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torchtap.spi import Receiver

__all__ = ["Channel", "Emitted", "booked", "come", "receivers"]

receivers: dict[int, Receiver] = {}  # by the number of their channel
# Channel -> site with a ticket -> the call that its gradient belongs to. Forgotten when nobody listens any more.
booked: dict[int | None, dict[str, int]] = {}
# Channel -> the sites with tickets whose gradient has come since they were booked.
come: dict[int | None, set[str]] = {}
_numbers = itertools.count(1)
_named: Counter[str] = Counter()


@final
class Channel:
    """A way from op calls in one model's graphs to one receiver. ``prefix`` goes before each site's name.

    ``purpose`` is a text that has the same number in every process, so that a compiler which keeps graphs on disk
    finds them again.
    """

    def __init__(self, purpose: str = "") -> None:
        self.number = _number_of(purpose) if purpose else next(_numbers)
        self.prefix = f"{self.number}|"

    def open(self, receiver: Receiver) -> None:
        """From now on what is emitted under this prefix reaches the receiver."""
        receivers[self.number] = receiver

    def is_open(self) -> bool:
        """Whether a receiver listens."""
        return self.number in receivers

    def close(self) -> None:
        """Nobody listens any more; the ops cost next to nothing."""
        receivers.pop(self.number, None)
        booked.pop(self.number, None)
        come.pop(self.number, None)


def _number_of(purpose: str) -> int:
    """A number that no other channel of this process has; the n-th of one purpose has the same in every process."""
    _named[purpose] += 1
    text = f"{purpose} {_named[purpose]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") | 1 << 60


class Emitted:
    """What is emitted of a place: these kinds, under an address. Nothing of it changes once it was traced.

    ``address`` is a module's path, after a channel's prefix where there is one.
    """

    def __init__(self, address: str, kinds: tuple[str, ...]) -> None:
        self.address = address
        self.kinds = kinds
        self.measured: tuple[str, ...] = ()  # the kinds of which only statistics are wanted
