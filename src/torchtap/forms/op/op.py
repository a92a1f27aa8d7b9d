"""The one carrier for forms in which Python hooks do not survive: dispatcher ops without a result.

``torchtap::emit(value, site)`` hands a value to whoever listens. ``torchtap::emit_grad(value, site)`` hands over
the gradient of a value when autograd has it. ``torchtap::call(site)`` counts a call that has no such value. All are
ordinary ops to TorchScript, FX, export, Dynamo, AOT autograd and Inductor, so they stay in every graph and are saved
with it. They guarantee:
- importing torchtap registers nothing; `register` does, once, and every form that needs the ops calls it;
- with nobody listening an op costs about two microseconds and touches nothing;
- the value goes through unchanged and the autograd graph is the same as without: gradients are read by a hook
  on the tensor, also inside a compiled backward;
- a value that activation checkpointing computes again is not handed over again.

A site that is put into a graph in this process carries the number of a `Channel` (`channel`), which belongs to one
receiver. One that travelled in a file and could not be given a number goes to every receiver that `listen`s in
this thread.

In a compiled backward a gradient arrives without the call that it belongs to. So, while AOT autograd traces, each
awaited gradient gets a ticket: the forward graph books the ticket for the call that is running, the backward
graph hands the gradient over under the same ticket (`channel.Tickets`).
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, final

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
from torchtap.spi import Receiver, reasons

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
_OF_A_GRAPH = "CompiledFunctionBackward"  # autograd's node of a graph that AOT autograd has compiled
_ELSEWHERE: by_name.CallOf = (-1, 0)  # the call of a ticket whose gradient is read outside of the graph
# Not from 1: a graph that Inductor kept on disk has tickets of the process that made it.
_tickets = itertools.count(int.from_bytes(os.urandom(6), "big"))
_ADDRESS = re.compile(r"(?:(\d+)!?\|)?(.*?)(?:~(\d+))?", re.DOTALL)
_PLACE = re.compile(r":([+=])(\d{1,9})(?:/(\d{1,9}))?>")

# What a graph emits when a pass begins: by whether the model trains, and whether gradients are on.
PASSES = {
    (True, True): "pass_learning",
    (True, False): "pass_in_training",
    (False, True): "pass_with_gradients",
    (False, False): "pass",
}
_MODES = {kind: mode for mode, kind in PASSES.items()}


@final
class Address(NamedTuple):
    """What an op was called with."""

    channel: int | None
    path: str
    kind: str
    leaf: str
    ticket: int | None
    place: by_name.Count | None  # None in a file of an older torchtap


def register() -> None:
    """Make the ops known to torch. Further calls do nothing."""
    global _library
    if _library is not None:
        return
    with _lock:
        if _library is None:
            _library = _define()


def heard() -> bool:
    """Return True if anyone listens to sites without a channel. Not to be asked in code that Dynamo traces."""
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
            channel.tickets.pop(None, None)


def note(site: str, reason: str) -> None:
    """Tell whoever listens to a site why it brings nothing."""
    at = address(site)
    for receiver in _receivers(at.channel):
        by_name.note(receiver, at.path, at.kind, reason)


def _define() -> torch.library.Library:
    for kernel in (_on_value, _on_awaited, _on_state, _on_call):
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
    for signature, kernel in (
        ("emit_state(Tensor state, str site, SymInt[] shape) -> ()", _on_state),
        ("call(str site, Tensor? near=None) -> ()", _on_call),
    ):
        name = signature.partition("(")[0]
        library.define(signature, alias_analysis="CONSERVATIVE")
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"torchtap::{name}", _nothing, lib=library)
        keep_in_order(getattr(torch.ops.torchtap, name).default)
        torch.fx.node.has_side_effect(getattr(torch.ops.torchtap, name).default)
    torch.library.register_vmap("torchtap::call", _batched_call, lib=library)
    # Above autograd, so that while AOT autograd traces, the tensor that gets the hook is the one it differentiates.
    library.impl("emit_grad", _on_awaited, "Autograd")
    return library


def _nothing(*_: object, **__: object) -> None:
    return None


def _batched_call(info: object, in_dims: object, site: str, near: Tensor | None = None) -> tuple[None, None]:
    torch.ops.torchtap.call(site)
    return None, None


def _batched(name: str) -> Any:
    def rule(info: object, in_dims: tuple[int | None, ...], value: Tensor, site: str) -> tuple[None, None]:
        """Under vmap the batch is one value, its mapped dimension first."""
        dim = in_dims[0]
        getattr(torch.ops.torchtap, name)(value if dim is None else value.movedim(dim, 0), site)
        return None, None

    return rule


@lru_cache(maxsize=65536)
def address(site: str) -> Address:
    """Return the parts of what an op was called with."""
    found = _ADDRESS.fullmatch(site)
    assert found is not None  # it takes any text
    channel, name, ticket = found.groups()
    place = None
    if (mark := _PLACE.search(name)) is not None:
        name = f"{name[: mark.start()]}:{name[mark.end() :]}"
        number = int(mark[2])
        place = by_name.Count(number) if mark[1] == "+" else by_name.Count(0, number, int(mark[3] or 1))
    path, kind, leaf, _ = read_name(name)
    return Address(
        int(channel) if channel else None, path, kind, leaf, int(ticket) if ticket else None, place
    )


def _receivers(number: int | None) -> tuple[Receiver, ...]:
    known = _listeners if number is None else (channel.receivers.get(number),)
    return tuple(each for each in known if each is not None and each.hears_this_thread())


def _on_value(value: Tensor, site: str) -> None:
    at = address(site)
    receivers = _receivers(at.channel)
    if not receivers or _is_repetition(at.kind):
        return
    call, followers = (None, ()) if at.ticket is None else _booked(at.channel, site)
    if call == _ELSEWHERE:
        return
    # A new tensor object each time: a compiler writes new values into memory, and so into tensors, that it has used
    # before, without a trace in their version.
    value = value.detach()
    for receiver in receivers:
        if at.kind in _MODES:
            receiver.end_pass()
            receiver.begin_pass(*_MODES[at.kind])
        elif at.kind in ("attention", "value"):
            receiver.take_from_inside(at.kind, at.path, at.leaf, value)
        else:
            by_name.take(receiver, at.path, at.kind, at.leaf, value, at.place, call)
            for other, number in followers:
                by_name.take(receiver, other.path, other.kind, other.leaf, value, other.place, number)


def _on_state(state: Tensor, site: str, shape: list[int]) -> None:
    at = address(site)
    receivers = _receivers(at.channel)
    if not receivers or _is_repetition(at.kind):
        return
    call, followers = (None, ()) if at.ticket is None else _booked(at.channel, site)
    for receiver in receivers if call != _ELSEWHERE else ():
        by_name.take_state(receiver, at.path, at.kind, at.leaf, state, shape, at.place, call)
        for other, number in followers:
            by_name.take_state(
                receiver, other.path, other.kind, other.leaf, state, shape, other.place, number
            )


def _booked(
    number: int | None, site: str
) -> tuple[by_name.CallOf | None, Sequence[tuple[Address, by_name.CallOf]]]:
    """Return the call that a ticket's gradient belongs to, and further sites whose gradient it is."""
    tickets = channel.tickets.get(number)
    return (None, ()) if tickets is None else (tickets.calls.get(site), tickets.followers.get(site, ()))


def _on_call(site: str, near: Tensor | None = None) -> None:
    """Count a call that has no value of a kind."""
    at = address(site)
    if not _is_repetition(at.kind):
        for receiver in _receivers(at.channel):
            by_name.count(receiver, at.path, at.kind, None, at.place, replayed=in_backward())


def _is_repetition(kind: str) -> bool:
    """Return True for a forward value while autograd is at work: a checkpoint computes it again."""
    return not kind.startswith("grad") and in_backward()


def _on_awaited(value: Tensor, site: str) -> None:
    if isinstance(value, FakeTensor):  # a compiler tries out what it has traced
        return
    at = address(site)
    if at.ticket is not None:
        for receiver in _receivers(at.channel):
            _book(receiver, site, at, value)
        return
    if isinstance(value, FunctionalTensor):
        # Traced by AOT autograd. What the hook does becomes a part of the backward graph; without one, the call
        # stays in the graph for whoever runs it with autograd, as an exported program may be.
        if value.requires_grad and torch.is_grad_enabled():
            site = f"{site}~{next(_tickets)}"
            ask_while_traced(value, lambda gradient: _emit_gradient(gradient, site))
        with below_autograd():
            torch.ops.torchtap.emit_grad(value, site)
        return
    for receiver in _receivers(at.channel):
        if at.kind == "value":
            receiver.await_value(at.leaf, value)  # type: ignore[attr-defined]
            continue
        _await(receiver, at, value if torch.is_grad_enabled() else value.detach())


def _book(receiver: Receiver, site: str, at: Address, value: Tensor) -> None:
    """Note, in the forward graph of a compiled model, which call the gradient under a ticket belongs to."""
    tickets = channel.tickets.setdefault(at.channel, channel.Tickets())
    if value.requires_grad:  # it was given to the graph, whose backward has only a part of its gradient
        tickets.book(site, _ELSEWHERE)
        _await(receiver, at, value)
    else:
        call = by_name.count(receiver, at.path, at.kind, at.leaf, at.place, replayed=in_backward())
        tickets.book(site, call, value if channel.PROMISE in site else None)


def _await(receiver: Receiver, at: Address, value: Tensor) -> None:
    """Ask for the gradient of a value: autograd, or the compiled graph that made it and may have used it since."""
    tickets = channel.tickets.get(at.channel)
    maker = None if tickets is None else tickets.maker_of(value)
    if maker is None and (type(value.grad_fn).__name__ != _OF_A_GRAPH or at.channel in channel.promising):
        by_name.await_gradient(receiver, at.path, at.kind, at.leaf, value, at.place, again=in_backward())
        return
    call = by_name.count(receiver, at.path, at.kind, at.leaf, at.place, replayed=in_backward())
    if tickets is not None and maker is not None:
        tickets.follow(maker, at, call)
    else:
        by_name.note(receiver, at.path, at.kind, reasons.ACROSS_GRAPHS)


def _emit_gradient(gradient: Tensor, site: str) -> None:
    """Emit a gradient into the backward graph that is being traced; a mark at the channel asks for statistics only."""
    if "!|" in site and is_fused(gradient):
        emit_measured(gradient, site)
    else:
        torch.ops.torchtap.emit.default(gradient, site)
