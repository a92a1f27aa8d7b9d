"""The one carrier for forms in which Python hooks do not survive: two dispatcher ops without a result.

``torchtap::emit(value, site)`` hands a value to whoever listens. ``torchtap::emit_grad(value, site)`` hands over
the gradient of a value when autograd has it. Both are ordinary ops to TorchScript, FX, export, Dynamo, AOT
autograd and Inductor, so they stay in every graph and are saved with it. They guarantee:
- importing torchtap registers nothing; `register` does, once, and every form that needs the ops calls it;
- with nobody listening an op costs about two microseconds and touches nothing;
- the value goes through unchanged and the autograd graph is the same as without: gradients are read by a hook
  on the tensor, also inside a compiled backward;
- a value that activation checkpointing computes again is not handed over again.

A site that is put into a graph in this process carries the number of a `Channel` (`channel`), which belongs to one
receiver. One that travelled in a file and could not be given a number goes to every receiver that `listen`s in
this thread.

In a compiled backward a gradient comes without the call that it belongs to. So, while AOT autograd traces, each
awaited gradient gets a ticket: the forward graph books the ticket for the call that is running, the backward
graph hands the gradient over under the same ticket.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchtap._torch import (
    FakeTensor,
    FunctionalTensor,
    below_autograd,
    in_backward,
    keep_in_order,
    leave_to_python,
)
from torchtap.forms.op import channel
from torchtap.forms.op.fused import emit_measured, is_fused
from torchtap.plan.names import read_name
from torchtap.receive import by_name
from torchtap.receive.gradients import ask_while_traced
from torchtap.spi import Receiver, ask_for_gradient, reasons

__all__ = [
    "PASSES",
    "address",
    "heard",
    "listen",
    "note",
    "register",
    "stop_listening",
]

_lock = threading.Lock()
_library: torch.library.Library | None = None
_listeners: tuple[Receiver, ...] = ()
# Not from 1: a graph that Inductor kept on disk has tickets of the process that made it.
_tickets = itertools.count(int.from_bytes(os.urandom(6), "big"))
_ADDRESS = re.compile(r"(?:(\d+)!?\|)?(.*?)(?:~(\d+))?", re.DOTALL)

# What a graph emits when a pass begins: by whether the model trains, and whether gradients are on.
PASSES = {
    (True, True): "pass_learning",
    (True, False): "pass_in_training",
    (False, True): "pass_with_gradients",
    (False, False): "pass",
}
_MODES = {kind: mode for mode, kind in PASSES.items()}

# channel, module path, kind, leaf, ticket
Address = tuple[int | None, str, str, str, int | None]


def register() -> None:
    """Make the two ops known to torch. Further calls do nothing."""
    global _library
    if _library is not None:
        return
    with _lock:
        if _library is None:
            _library = _define()


def heard() -> bool:
    """Whether anyone listens to sites without a channel. Not to be asked in code that Dynamo traces."""
    return bool(_listeners)


def listen(receiver: Receiver) -> None:
    """Let a receiver hear sites that have no channel."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, receiver)


def stop_listening(receiver: Receiver) -> None:
    """The opposite of `listen`; harmless when it did not."""
    global _listeners
    with _lock:
        _listeners = tuple(each for each in _listeners if each is not receiver)
        if not _listeners:
            channel.booked.pop(None, None)
            channel.come.pop(None, None)


def note(site: str, reason: str) -> None:
    """Tell whoever listens to a site why it brings nothing."""
    number, path, kind, _, _ = address(site)
    for receiver in _receivers(number):
        by_name.note(receiver, path, kind, reason)


def _define() -> torch.library.Library:
    for kernel in (_on_value, _on_awaited, _on_state):
        leave_to_python(kernel)
    library = torch.library.Library("torchtap", "DEF")
    for name, kernel in (("emit", _on_value), ("emit_grad", _on_awaited)):
        # CONSERVATIVE is what keeps TorchScript from dropping or moving a call that returns nothing.
        library.define(f"{name}(Tensor value, str site) -> ()", alias_analysis="CONSERVATIVE")
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"torchtap::{name}", _nothing, lib=library)
        torch.library.register_vmap(f"torchtap::{name}", _batched(name), lib=library)
        op = getattr(torch.ops.torchtap, name).default
        keep_in_order(op)
        torch.fx.node.has_side_effect(op)
    library.define("emit_state(Tensor state, str site, SymInt[] shape) -> ()", alias_analysis="CONSERVATIVE")
    library.impl("emit_state", _on_state, "CompositeExplicitAutograd")
    torch.library.register_fake("torchtap::emit_state", _nothing, lib=library)
    keep_in_order(torch.ops.torchtap.emit_state.default)
    torch.fx.node.has_side_effect(torch.ops.torchtap.emit_state.default)
    # Above autograd, so that while AOT autograd traces, the tensor that gets the hook is the one it differentiates.
    library.impl("emit_grad", _on_awaited, "Autograd")
    return library


def _nothing(value: Tensor, site: str, shape: object = None) -> None:
    return None


def _batched(name: str) -> Any:
    def rule(info: object, in_dims: tuple[int | None, ...], value: Tensor, site: str) -> tuple[None, None]:
        """Under vmap the batch is one value, its mapped dimension first."""
        dim = in_dims[0]
        getattr(torch.ops.torchtap, name)(value if dim is None else value.movedim(dim, 0), site)
        return None, None

    return rule


@lru_cache(maxsize=65536)
def address(site: str) -> Address:
    """Channel, module path, kind, leaf and ticket of what an op was called with."""
    found = _ADDRESS.fullmatch(site)
    assert found is not None  # it takes any text
    channel, name, ticket = found.groups()
    path, kind, leaf, _ = read_name(name)
    return int(channel) if channel else None, path, kind, leaf, int(ticket) if ticket else None


def _receivers(number: int | None) -> tuple[Receiver, ...]:
    if number is None:
        return tuple(receiver for receiver in _listeners if receiver.hears_this_thread())
    receiver = channel.receivers.get(number)
    return (receiver,) if receiver is not None and receiver.hears_this_thread() else ()


def _on_value(value: Tensor, site: str) -> None:
    number, path, kind, leaf, ticket = address(site)
    receivers = _receivers(number)
    if not receivers or _is_repetition(kind):
        return
    call = None if ticket is None else _booked_call(number, site)
    # A new tensor object each time: a compiler writes new values into memory, and so into tensors, that it has used
    # before, without a trace in their version.
    value = value.detach()
    for receiver in receivers:
        if kind in _MODES:
            receiver.end_pass()
            receiver.begin_pass(*_MODES[kind])
        elif kind in ("attention", "value"):
            receiver.take_from_inside(kind, path, leaf, value)
        else:
            by_name.take(receiver, path, kind, leaf, value, call)


def _on_state(state: Tensor, site: str, shape: list[int]) -> None:
    number, path, kind, leaf, ticket = address(site)
    receivers = _receivers(number)
    if not receivers or _is_repetition(kind):
        return
    call = None if ticket is None else _booked_call(number, site)
    for receiver in receivers:
        by_name.take_state(receiver, path, kind, leaf, state, shape, call)


def _booked_call(number: int | None, site: str) -> int | None:
    """The call that a gradient belongs to, which comes now."""
    channel.come.setdefault(number, set()).add(site)
    return channel.booked.get(number, {}).get(site)


def _is_repetition(kind: str) -> bool:
    """A forward value while autograd is at work is one that a checkpoint computes again."""
    return not kind.startswith("grad") and in_backward()


def _on_awaited(value: Tensor, site: str) -> None:
    if isinstance(value, FakeTensor):  # a compiler tries out what it has traced
        return
    number, path, kind, leaf, ticket = address(site)
    if ticket is not None:  # in the forward graph of a compiled model
        for receiver in _receivers(number):
            channel.booked.setdefault(number, {})[site] = by_name.next_call(receiver, path, kind, leaf)
            channel.come.setdefault(number, set()).discard(site)
            if (
                value.requires_grad
            ):  # it came into the graph, which may have no backward: that of a hook alone
                ask_for_gradient(value, _note_unless_come, receiver, site)
        return
    wanted = value.requires_grad and torch.is_grad_enabled()
    if isinstance(value, FunctionalTensor):
        # Traced by AOT autograd. What the hook does becomes a part of the backward graph; without one, the call
        # stays in the graph for whoever runs it with autograd, as an exported program may be.
        if wanted:
            site = f"{site}~{next(_tickets)}"
            ask_while_traced(value, lambda gradient: _emit_gradient(gradient, site))
        with below_autograd():
            torch.ops.torchtap.emit_grad(value, site)
        return
    if not wanted:
        for receiver in _receivers(number):
            by_name.note(receiver, path, kind, reasons.NO_GRADIENT)
        return
    for receiver in _receivers(number):
        by_name.await_gradient(receiver, path, kind, leaf, value)


def _note_unless_come(receiver: Receiver, site: str, gradient: Tensor | None) -> None:
    number, path, kind, _, _ = address(site)
    if gradient is not None and site not in channel.come.get(number, ()):
        by_name.note(receiver, path, kind, reasons.OUTSIDE_THE_GRAPH)


def _emit_gradient(gradient: Tensor, site: str) -> None:
    """Emit a gradient into the backward graph that is being traced; a mark at the channel asks for statistics only."""
    if "!|" in site and is_fused(gradient):
        emit_measured(gradient, site)
    else:
        torch.ops.torchtap.emit.default(gradient, site)
