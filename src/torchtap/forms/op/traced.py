"""What the hook of an eager session does when a compiler traces it: it emits through the op, into the graph.

So a session that was there before ``torch.compile`` is not in its way, and goes on getting its values. What emits is
loaded when a compiler first comes by: most sessions meet none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtap._torch import mark_constant
from torchtap.forms.op.channel import Channel, Emitted
from torchtap.hooks.leaves import input_leaves, leaves
from torchtap.plan.names import Kind, site_name

if TYPE_CHECKING:
    from torchtap.hooks.arguments import Args, Kwargs
    from torchtap.receive.entries import PortState

__all__ = ["emitting_inputs", "emitting_output", "emitting_pass"]


def _loaded() -> bool:
    """Load what emits. Dynamo runs it while it traces, and has nothing of it in the graph.

    The imports after it only look up what is there.
    """
    from torchtap.forms.op import emitted, op

    op.register()
    return emitted is not None


mark_constant(_loaded)


def emitting_output(channel: Channel, path: str, kind: Kind) -> Callable[[object], None]:
    """A function that emits the tensors that a module returned."""
    what = Emitted(channel.prefix + path, (kind,))

    def emit(output: object) -> None:
        if _loaded():
            from torchtap.forms.op.emitted import emit_leaves

            emit_leaves(what, leaves(output))

    return emit


def emitting_pass(channel: Channel, root: nn.Module) -> Callable[[Args, Kwargs], None]:
    """A function that has the graph tell of each pass. The model's mode is a constant there: the compiler guards it."""
    prefix = channel.prefix

    def emit(args: Args, kwargs: Kwargs) -> None:
        if not _loaded():
            return
        from torchtap.forms.op.op import PASSES

        learning = torch.is_grad_enabled()
        kind = PASSES[root.training, learning]
        for _, tensor in input_leaves(None, args, kwargs):
            torch.ops.torchtap.emit.default(tensor, site_name(prefix, kind))
            break

    return emit


def emitting_inputs(channel: Channel, port: PortState) -> Callable[[Args, Kwargs], None]:
    """A function that emits the tensors that a module was given."""
    what, names = Emitted(channel.prefix + port.port.site.path, (port.kind,)), port.input_names

    def emit(args: Args, kwargs: Kwargs) -> None:
        if _loaded():
            from torchtap.forms.op.emitted import emit_leaves

            emit_leaves(what, input_leaves(names, args, kwargs))

    return emit
