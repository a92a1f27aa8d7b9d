"""What the hook of an eager session does when a compiler traces it: it emits through the op, into the graph.

So a session that was there before ``torch.compile`` is not in its way, and goes on getting its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torchtap.taps.carry import op
from torchtap.taps.carry.carrier import emit_leaves
from torchtap.taps.receive.entries import LivePort
from torchtap.taps.receive.leaves import input_leaves, leaves

__all__ = ["TracedPort"]


@final
class TracedPort:
    """A port of a plan, as a compiler sees it."""

    __slots__ = ("_address", "_kinds", "_names")

    def __init__(self, channel: op.Channel, port: LivePort) -> None:
        self._address = channel.prefix + port.port.site.path
        self._kinds = (port.kind,)
        self._names = port.input_names

    def emit_output(self, output: Any) -> None:
        """Emit the tensors that a module returned."""
        if op.registered():
            emit_leaves(self._address, self._kinds, leaves(output))

    def emit_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Emit the tensors that a module was given."""
        if op.registered():
            emit_leaves(self._address, self._kinds, input_leaves(self._names, args, kwargs))
