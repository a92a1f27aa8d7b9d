"""Emit the values of an eager session into the graph when a compiler traces its hooks.

A session that began before ``torch.compile`` does not disturb the compiler and still receives its values. The op is
loaded when a compiler first traces a hook: most sessions meet none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from torchtap._torch import mark_constant
from torchtap.forms.op.channel import Channel, Emitted
from torchtap.spi import input_leaves, leaves

if TYPE_CHECKING:
    from torchtap.spi import PortState, Receiver

__all__ = ["GraphEmitter"]


def _loaded() -> bool:
    """Load the op. Dynamo runs this while it traces, and puts nothing of it into the graph."""
    from torchtap.forms.op import emitted, op

    op.register()
    return emitted is not None


mark_constant(_loaded)


@final
class GraphEmitter:
    """The functions that hooks call while a compiler traces them."""

    def __init__(self) -> None:
        self._channel = Channel()

    def open(self, receiver: Receiver) -> None:
        """Pass emitted values to this receiver."""
        self._channel.open(receiver)

    def close(self) -> None:
        """Drop emitted values."""
        self._channel.close()

    def output(self, path: str, kind: str) -> Callable[[object], None]:
        """Return a function that emits a module's output."""
        what = Emitted(self._channel.prefix + path, (kind,))

        def emit(output: object) -> None:
            if _loaded():
                from torchtap.forms.op.emitted import emit_leaves

                emit_leaves(what, leaves(output))

        return emit

    def inputs(self, port: PortState) -> Callable[[Any, Any], None]:
        """Return a function that emits a module's arguments."""
        what, names = Emitted(self._channel.prefix + port.port.site.path, (port.kind,)), port.input_names

        def emit(args: Any, kwargs: Any) -> None:
            if _loaded():
                from torchtap.forms.op.emitted import emit_leaves

                emit_leaves(what, input_leaves(names, args, kwargs))

        return emit

    def passes(self, root: nn.Module) -> Callable[[Any, Any], None]:
        """Return a function that emits the beginning of a pass. The compiler guards the model's mode."""
        prefix = self._channel.prefix

        def emit(args: Any, kwargs: Any) -> None:
            if not _loaded():
                return
            from torchtap.forms.op.op import PASSES

            kind = PASSES[root.training, torch.is_grad_enabled()]
            for _, tensor in input_leaves(None, args, kwargs):
                torch.ops.torchtap.emit.default(tensor, f"{prefix}:{kind}")
                break

        return emit
