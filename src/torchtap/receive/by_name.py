"""Values that reach a receiver by name: from graphs, from dispatcher ops, and from ``emit`` inside a model.

They know a module's path and no port. Values that no tap of the plan selects are dropped. Finding the active receivers
is one tuple look-up without a lock; the tuple is replaced, never changed. A value has its place among the calls of its
module (`Count`), so that a call without this value is counted too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn

from torchtap.plan.names import site_name

if TYPE_CHECKING:
    from torchtap.hooks.hooks import Handle
    from torchtap.receive.receiver import PortState, Receiver

__all__ = [
    "NEXT",
    "CallOf",
    "Count",
    "activate",
    "await_gradient",
    "busy",
    "count",
    "deactivate",
    "emit",
    "listening",
    "note",
    "owner_of",
    "paths",
    "refuse",
    "take",
    "take_state",
]

Owner = TypeVar("Owner")
CallOf: TypeAlias = tuple[int, int]  # a call: its number in its pass, and the number of the pass

# Addresses of the modules that are being traced, the innermost last; empty outside of tracing. A tracer has no Python
# stack to look at. Dynamo reads and writes the list like any other Python object.
paths: list[str] = []
# Not empty while a wrapped attention function is being traced: one entry point calls another.
busy: list[bool] = []
_lock = threading.Lock()
_active: tuple[Receiver, ...] = ()


@final
class _Activation:
    """Deactivates a receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def remove(self) -> None:
        deactivate(self._receiver)


def activate(receiver: Receiver) -> Handle:
    """Make a receiver active."""
    global _active
    with _lock:
        if receiver not in _active:
            _active = (*_active, receiver)
    return _Activation(receiver)


def deactivate(receiver: Receiver) -> None:
    """Undo `activate`; a no-op for a receiver that is not active."""
    global _active
    if receiver not in _active:
        return
    with _lock:
        _active = tuple(each for each in _active if each is not receiver)


def listening() -> tuple[Receiver, ...]:
    """Return the active receivers of this thread, most often none or one."""
    return tuple(receiver for receiver in _active if receiver.hears_this_thread()) if _active else ()


def owner_of(frame: FrameType | None, known: Callable[[nn.Module], Owner | None]) -> Owner | None:
    """Return ``known(module)`` of the innermost module whose code runs in a frame or above it."""
    while frame is not None:
        running = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(running, nn.Module):
            owner = known(running)
            if owner is not None:
                return owner
        frame = frame.f_back
    return None


def emit(name: str, value: Tensor) -> Tensor:
    """Name a value inside a forward, so that it has a site: ``<module path>:value.<name>``. Returns the value.

    Without a session that records values it costs one look-up.
    """
    if paths:  # while tracing the value becomes a part of the graph
        torch.ops.torchtap.emit.default(value, site_name(paths[-1], "value", name))
    elif not torch.compiler.is_compiling() and _active:
        for receiver in listening():
            if receiver.listens_to("value"):
                receiver.take_from_inside("value", owner_of(sys._getframe(1), receiver.path_of), name, value)
    return value


# -- values of graphs ------------------------------------------------------------------------------------


@final
class Count(NamedTuple):
    """The call that a value belongs to: so many calls after the newest one, or the call with this number."""

    ahead: int = 1
    number: int | None = None
    total: int = 1  # calls of the module in a pass, if ``number`` is given


NEXT = Count()


def take(
    receiver: Receiver,
    path: str,
    kind: str,
    leaf: str,
    tensor: Tensor,
    place: Count | None,
    call: CallOf | None = None,
) -> None:
    """Receive a value. ``call`` is what `count` returned if its call was counted before."""
    leaf, port, call = _found(receiver, path, kind, leaf, place, call)
    if port is not None and call is not None:
        receiver.take_leaf(port, leaf, call[0], tensor, call[1])


def take_state(
    receiver: Receiver,
    path: str,
    kind: str,
    leaf: str,
    state: Tensor,
    shape: Iterable[int],
    place: Count | None,
    call: CallOf | None = None,
) -> None:
    """Receive the statistics of a value that were computed in the graph."""
    leaf, port, call = _found(receiver, path, kind, leaf, place, call)
    if port is not None and call is not None:
        site = receiver.accumulator.site(port, leaf, *call)
        if site is not None:
            receiver.accumulator.fold_state(site, shape, state)


def count(
    receiver: Receiver, path: str, kind: str, leaf: str | None, place: Count | None, *, replayed: bool = False
) -> CallOf:
    """Count a call of which no value arrives now: none at all (no leaf), or only a gradient later.

    Return its number in its pass, and that of the pass.
    """
    port = receiver.ports.get((path, kind, ""))
    call = None if port is None else _counted(receiver, port, leaf or "", place, replayed)
    if port is None or call is None:
        return 0, 0
    if leaf is not None:
        # Sites are listed in the order of the forward, and gradients are received in reverse.
        receiver.accumulator.site(port, leaf, *call)
    return call


def note(receiver: Receiver, path: str, kind: str, reason: str) -> None:
    """Note why a place has no value."""
    port = receiver.ports.get((path, kind, ""))
    if port is not None:
        port.note = reason


def await_gradient(
    receiver: Receiver,
    path: str,
    kind: str,
    leaf: str,
    tensor: Tensor,
    place: Count | None,
    *,
    again: bool = False,
) -> None:
    """Request the gradient of a value; with ``again``, unless it was requested when the call ran."""
    leaf, port, call = _found(receiver, path, kind, leaf, place, None, again)
    if port is not None and call is not None:
        receiver.request_gradient(port, leaf, call, tensor, again)


def refuse(receiver: Receiver, path: str, kind: str, leaf: str, reason: str) -> None:
    """Receive no gradient of the newest call's value, unless it was requested when the call ran."""
    port, current = receiver.ports.get((path, kind, "")), receiver.current()
    if port is None or current is None:
        return
    site = port.sites.get((leaf, max(current.calls.get(port, 0) - 1, 0), current.number if port.apart else 0))
    if site is not None and not site.grad_requested and site.shape is None:
        receiver.form.missing[site.name] = reason


def _found(
    receiver: Receiver,
    path: str,
    kind: str,
    leaf: str,
    place: Count | None,
    call: CallOf | None,
    replayed: bool = False,
) -> tuple[str, PortState | None, CallOf | None]:
    """Return the name of a leaf, its port, and its call, which is counted unless it was before."""
    if receiver.form.rename is not None:
        leaf = receiver.form.rename(receiver.totals.passes, path, leaf)
    port = receiver.ports.get((path, kind, "")) or receiver.ports.get((path, kind, leaf))
    if port is not None and call is None:
        call = _counted(receiver, port, leaf, place, replayed)
    return leaf, port, call


def _counted(
    receiver: Receiver, port: PortState, leaf: str, place: Count | None, replayed: bool
) -> CallOf | None:
    current = receiver.current()
    if current is None:
        return None
    if place is None:  # made by an older torchtap
        return current.next_leaf_call(port, leaf), current.number
    if place.number is not None:
        current.calls[port] = max(current.calls.get(port, 0), place.total)
        port.called = True
        return place.number, current.number
    return current.advance(port, place.ahead, replayed=replayed), current.number
