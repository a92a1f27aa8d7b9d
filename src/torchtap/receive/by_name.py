"""The half of a receiver that takes values by name: from graphs, and from models that emit.

A carrier knows which module a value belongs to, and no port. What no tap of the plan asks for is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from torchtap.receive.entries import PortState
from torchtap.receive.gradients import ask_for_gradient
from torchtap.receive.receiver import Receiver

__all__ = ["await_gradient", "next_call", "note", "take", "take_state"]


def take(
    receiver: Receiver, path: str, kind: str, leaf: str, tensor: Tensor, call: int | None = None
) -> None:
    """A value. Without ``call`` it is of the next one."""
    if receiver.rename is not None:
        leaf = receiver.rename(receiver.passes, path, leaf)
    port = receiver.ports.get((path, kind, "")) or receiver.ports.get((path, kind, leaf))
    if port is not None:
        receiver.take_leaf(port, leaf, _next(receiver, port, leaf) if call is None else call, tensor)


def take_state(
    receiver: Receiver,
    path: str,
    kind: str,
    leaf: str,
    state: Tensor,
    shape: Iterable[int],
    call: int | None = None,
) -> None:
    """The statistics of a value that were computed where it was made; the value itself stays there."""
    port = receiver.ports.get((path, kind, ""))
    if port is None:
        return
    entry = receiver.folding.entry(port, leaf, _next(receiver, port, leaf) if call is None else call)
    if entry is not None:
        receiver.folding.fold_state(entry, shape, state)


def next_call(receiver: Receiver, path: str, kind: str, leaf: str) -> int:
    """The number of the call that a value of which only the gradient will come belongs to."""
    port = receiver.ports.get((path, kind, ""))
    if port is None:
        return 0
    call = _next(receiver, port, leaf)
    # Sites are in the order of the forward; gradients come the other way round.
    receiver.folding.entry(port, leaf, call)
    return call


def note(receiver: Receiver, path: str, kind: str, reason: str) -> None:
    """Why a place brings nothing."""
    port = receiver.ports.get((path, kind, ""))
    if port is not None:
        port.note = reason


def await_gradient(
    receiver: Receiver, path: str, kind: str, leaf: str, tensor: Tensor, *, again: bool = False
) -> None:
    """Ask autograd for the gradient of a value.

    ``again``: of the newest call, if it was not asked for already.
    """
    if receiver.rename is not None:
        leaf = receiver.rename(receiver.passes, path, leaf)
    port = receiver.ports.get((path, kind, ""))
    if port is None:
        return
    call = port.leaf_calls.get(leaf, 1) - 1 if again else _next(receiver, port, leaf)
    entry = receiver.folding.entry(port, leaf, call)
    if entry is not None and not (again and entry.asked):
        entry.asked = not again
        tally = receiver.folding.tally
        ask_for_gradient(tensor, receiver.take_gradient, entry, tally, tally.serial)


def _next(receiver: Receiver, port: PortState, leaf: str) -> int:
    return port.next_leaf_call(receiver.pass_number, leaf)
