"""Which receivers are listening now: for carriers that reach us from inside a model and know no session.

A dispatcher op, a patched function and ``emit`` all start here. Reading is one tuple look-up without a lock;
the tuple is replaced, never changed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, TypeVar, final

import torch
from torch import Tensor, nn

from torchtap.plan.names import site_name
from torchtap.receive import inside

if TYPE_CHECKING:
    from torchtap.hooks.hooks import Handle
    from torchtap.receive.receiver import Receiver

__all__ = ["activate", "deactivate", "emit", "listening", "owner_of"]

Owner = TypeVar("Owner")

_lock = threading.Lock()
_active: tuple[Receiver, ...] = ()


@final
class _Activation:
    """What takes a receiver off again."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def remove(self) -> None:
        deactivate(self._receiver)


def activate(receiver: Receiver) -> Handle:
    """Let a receiver hear what carriers bring."""
    global _active
    with _lock:
        if receiver not in _active:
            _active = (*_active, receiver)
    return _Activation(receiver)


def deactivate(receiver: Receiver) -> None:
    """The opposite of `activate`; harmless when it was not active."""
    global _active
    if receiver not in _active:  # nobody else makes it so
        return
    with _lock:
        _active = tuple(each for each in _active if each is not receiver)


def listening() -> tuple[Receiver, ...]:
    """The receivers that want to hear from this thread, most often none or one."""
    active = _active
    if not active:
        return active
    return tuple(receiver for receiver in active if receiver.hears_this_thread())


def owner_of(frame: FrameType | None, known: Callable[[nn.Module], Owner | None]) -> Owner | None:
    """What ``known`` says of the innermost module whose code runs in a frame or above it."""
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

    With no session that asks for values it costs one look-up.
    """
    if inside.paths:  # a tracer follows: the value becomes a part of the graph
        torch.ops.torchtap.emit.default(value, site_name(inside.paths[-1], "value", name))
    elif not torch.compiler.is_compiling() and _active:
        for receiver in listening():
            if receiver.listens_to("value"):
                receiver.take_from_inside("value", owner_of(sys._getframe(1), receiver.path_of), name, value)
    return value
