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
from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn

from torchtap.plan.names import site_name
from torchtap.receive import reasons

if TYPE_CHECKING:
    from torchtap.hooks.hooks import Handle
    from torchtap.receive.receiver import PortState, Receiver

__all__ = [
    "NEXT",
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
    active = _active
    if not active:
        return active
    lanes = (receiver.lane() for receiver in active)
    return tuple(lane for lane in lanes if lane is not None)


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
    call: int | None = None,
) -> None:
    """Receive a value. ``call`` is the number of its call if it was counted before."""
    leaf, port = _port(receiver, path, kind, leaf)
    if port is not None:
        receiver.take_leaf(
            port, leaf, _counted(receiver, port, leaf, place) if call is None else call, tensor
        )


def take_state(
    receiver: Receiver,
    path: str,
    kind: str,
    leaf: str,
    state: Tensor,
    shape: Iterable[int],
    place: Count | None,
    call: int | None = None,
) -> None:
    """Receive the statistics of a value that were computed in the graph."""
    leaf, port = _port(receiver, path, kind, leaf)
    if port is None:
        return
    call = _counted(receiver, port, leaf, place) if call is None else call
    site = receiver.accumulator.site(port, leaf, call)
    if site is not None:
        receiver.accumulator.fold_state(site, shape, state)


def count(
    receiver: Receiver, path: str, kind: str, leaf: str | None, place: Count | None, *, replayed: bool = False
) -> int:
    """Count a call of which no value arrives now: none at all (no leaf), or only a gradient later."""
    port = receiver.ports.get((path, kind, ""))
    if port is None:
        return 0
    call = _counted(receiver, port, leaf or "", place, replayed)
    if leaf is not None:
        # Sites are listed in the order of the forward, and gradients are received in reverse.
        receiver.accumulator.site(port, leaf, call)
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
    leaf, port = _port(receiver, path, kind, leaf)
    if port is None:
        return
    call = _counted(receiver, port, leaf, place, again)
    if not tensor.requires_grad:
        port.note = reasons.NO_GRADIENT
        return
    from torchtap.receive.gradients import ask_for_gradient

    site = receiver.accumulator.site(port, leaf, call)
    if site is not None and not (again and site.grad_requested):
        site.grad_requested = not again
        phase = receiver.accumulator.phase
        ask_for_gradient(tensor, receiver.take_gradient, site, phase, phase.serial)


def refuse(receiver: Receiver, path: str, kind: str, leaf: str, reason: str) -> None:
    """Receive no gradient of the newest call's value, unless it was requested when the call ran."""
    port = receiver.ports.get((path, kind, ""))
    site = None if port is None else port.sites.get((leaf, max(port.calls - 1, 0)))
    if site is not None and not site.grad_requested and site.shape is None:
        receiver.form.missing[site.name] = reason


def _port(receiver: Receiver, path: str, kind: str, leaf: str) -> tuple[str, PortState | None]:
    if receiver.form.rename is not None:
        leaf = receiver.form.rename(receiver.totals.passes, path, leaf)
    return leaf, receiver.ports.get((path, kind, "")) or receiver.ports.get((path, kind, leaf))


def _counted(
    receiver: Receiver, port: PortState, leaf: str, place: Count | None, replayed: bool = False
) -> int:
    if place is None:  # made by an older torchtap
        return port.next_leaf_call(receiver.pass_number, leaf)
    if place.number is not None:
        return port.call_at(receiver.pass_number, place.number, place.total)
    return port.advance(receiver.pass_number, place.ahead, replayed=replayed)
