"""What the hook of an eager session does when a compiler traces it: it emits through the op, into the graph.

So a session that was there before ``torch.compile`` is not in its way, and goes on getting its values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from torchtap.names import Kind, site_name
from torchtap.taps.carry import op
from torchtap.taps.carry.emitted import Emitted, emit_leaves
from torchtap.taps.receive.entries import LivePort
from torchtap.taps.walk.arguments import Args, Kwargs
from torchtap.taps.walk.leaves import input_leaves, leaves

__all__ = ["emitting_inputs", "emitting_output", "emitting_outputs", "emitting_pass"]


def emitting_output(channel: op.Channel, path: str, kind: Kind) -> Callable[[object], None]:
    """A function that emits the tensors that a module returned."""
    what = Emitted(channel.prefix + path, (kind,))

    def emit(output: object) -> None:
        if op.registered():
            emit_leaves(what, leaves(output))

    return emit


def emitting_outputs(channel: op.Channel) -> Callable[[tuple[int, str], object], None]:
    """The same for the outputs of many modules: a stop is a port's number and the module's path."""
    what = Emitted(channel.prefix, ("output",))

    def emit(stop: tuple[int, str], output: object) -> None:
        if op.registered():
            emit_leaves(what, leaves(output), stop[1])

    return emit


def emitting_pass(channel: op.Channel, root: nn.Module) -> Callable[[Args, Kwargs], None]:
    """A function that has the graph tell of each pass. The model's mode is a constant there: the compiler guards it."""
    prefix = channel.prefix

    def emit(args: Args, kwargs: Kwargs) -> None:
        if not op.registered():
            return
        learning = torch.is_grad_enabled()
        kind = op.PASSES[root.training, learning]
        for _, tensor in input_leaves(None, args, kwargs):
            torch.ops.torchtap.emit.default(tensor, site_name(prefix, kind))
            break

    return emit


def emitting_inputs(channel: op.Channel, port: LivePort) -> Callable[[Args, Kwargs], None]:
    """A function that emits the tensors that a module was given."""
    what, names = Emitted(channel.prefix + port.port.site.path, (port.kind,)), port.input_names

    def emit(args: Args, kwargs: Kwargs) -> None:
        if op.registered():
            emit_leaves(what, input_leaves(names, args, kwargs))

    return emit
