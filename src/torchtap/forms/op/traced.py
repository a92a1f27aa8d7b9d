"""Emit the values of an eager session into the graph when a compiler traces its hooks.

A session that began before ``torch.compile`` does not disturb the compiler and still receives its values. The op is
loaded when a compiler first traces a hook: most sessions meet none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from torchtap._torch import mark_constant
from torchtap.forms.op.channel import Channel, Emitted
from torchtap.spi import input_leaves, leaves

if TYPE_CHECKING:
    from torchtap.spi import PortState

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
        self.channel = Channel()

    def prepare(self, ports: Iterable[PortState]) -> dict[tuple[str, str], Emitted]:
        """Return what is emitted of each port, by path and kind. A compiler guards these objects as a whole."""
        prefix = self.channel.prefix
        return {(port.site.path, port.kind): Emitted(prefix + port.site.path, (port.kind,)) for port in ports}

    def output(self, what: Emitted, output: object) -> None:
        """Emit a module's output."""
        if _loaded():
            from torchtap.forms.op.emitted import emit_leaves

            emit_leaves(what, leaves(output))

    def inputs(self, what: Emitted, names: tuple[str, ...] | None, args: Any, kwargs: Any) -> None:
        """Emit a module's arguments."""
        if _loaded():
            from torchtap.forms.op.emitted import emit_leaves

            emit_leaves(what, input_leaves(names, args, kwargs))

    def begin_pass(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        """Emit the beginning of a pass. The compiler guards the model's mode."""
        if not _loaded():
            return
        from torchtap.forms.op.op import PASSES

        kind = PASSES[root.training, torch.is_grad_enabled()]
        for _, tensor in input_leaves(None, args, kwargs):
            torch.ops.torchtap.emit.default(tensor, f"{self.channel.prefix}:{kind}")
            break
