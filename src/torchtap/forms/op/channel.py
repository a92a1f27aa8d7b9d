"""Ways from what graphs emit to the receivers in this process. Apart from the op, which only a graph needs."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from typing import TYPE_CHECKING, final
from weakref import ref

from torchtap.plan.names import KINDS

if TYPE_CHECKING:
    from torch import Tensor

    from torchtap.forms.op.op import Address
    from torchtap.receive.by_name import CallOf
    from torchtap.spi import Receiver

__all__ = [
    "CALL",
    "PROMISE",
    "SAME_CALL",
    "Channel",
    "Emitted",
    "Tickets",
    "absolute",
    "marked",
    "promising",
    "receivers",
    "relative",
    "tickets",
]

_KIND = re.compile(rf"(.*?):(?:[+=][0-9/]+>)?({'|'.join(KINDS)})(.*)", re.DOTALL)
receivers: dict[int, Receiver] = {}  # by the number of their channel
_numbers = itertools.count(1)

# A site in a graph has, in front of its kind, which call of its module it is of: ``blocks.0:+1>output``. So calls are
# counted alike whether or not a call has this value.
CALL, SAME_CALL = "+1>", "+0>"


def relative(calls: int) -> str:
    """Return the mark of a value that belongs to the call this many calls after the newest one."""
    return f"+{calls}>"


def absolute(number: int, total: int) -> str:
    """Return the mark of a value of the call with this number, of so many in a pass."""
    return f"={number}/{total}>"


def marked(site: str, mark: str) -> str:
    """Return a site's text with another mark, or with a first one."""
    path, kind, rest = _KIND.fullmatch(site).groups()  # type: ignore[union-attr]
    return f"{path}:{mark}{kind}{rest}"


_named: Counter[str] = Counter()


@final
class Tickets:
    """The gradients that compiled graphs of one channel have promised: which call each belongs to."""

    def __init__(self) -> None:
        # By site with a ticket: the call's number in its pass, and that of the pass.
        self.calls: dict[str, CallOf] = {}
        self.followers: dict[str, list[tuple[Address, CallOf]]] = {}  # further sites with the same gradient
        self._made: dict[int, tuple[ref[Tensor], str]] = {}  # values that are alive, by identity

    def book(self, site: str, call: CallOf, value: Tensor | None = None) -> None:
        """Promise the gradient of a value that the graph has made. ``value`` is given if it is a result of the graph.

        Of other values Inductor may write a later one into the same tensor.
        """
        self.calls[site] = call
        self.followers.pop(site, None)
        if value is not None:
            self._made[id(value)] = ref(value), site

    def maker_of(self, value: Tensor) -> str | None:
        """Return the ticket of the graph that made a value."""
        found = self._made.get(id(value))
        return None if found is None or found[0]() is not value else found[1]

    def follow(self, maker: str, at: Address, call: CallOf) -> None:
        """Give a further site the gradient of a ticket."""
        self.followers.setdefault(maker, []).append((at, call))


# Channels in whose graphs every result that the graph itself uses has a ticket, under this kind.
promising: set[int | None] = set()
PROMISE = "grad_promise"
tickets: dict[int | None, Tickets] = {}  # by channel; forgotten when nobody listens any more


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
        """Return True if a receiver listens."""
        return self.number in receivers

    def close(self) -> None:
        """Nobody listens any more; the ops cost next to nothing."""
        receivers.pop(self.number, None)
        tickets.pop(self.number, None)


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
