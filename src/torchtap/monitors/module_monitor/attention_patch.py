"""Attention with no change in the model: the core tells a monitor of each attention in monitored steps.

A value belongs to the innermost module whose code made the call. A monitor that is dropped in the middle of a step
hears nothing more.
"""

from __future__ import annotations

import re
import weakref
from functools import partial
from typing import TYPE_CHECKING, final

from torch import nn

from torchtap.monitors.module_monitor.attention import monitor_heads
from torchtap.taps.eager.attention_calls import AttentionCall, listen
from torchtap.taps.receive.active import owner_of

if TYPE_CHECKING:
    from torchtap.monitors.module_monitor.monitor import ModuleMonitor

__all__ = ["AttentionPatch"]


@final
class AttentionPatch:
    """One monitor's interest in attention; ``where`` is True or a pattern for module names."""

    def __init__(self, monitor: ModuleMonitor, where: bool | str) -> None:
        self._monitor = weakref.proxy(monitor)
        self._pattern = re.compile(".*" if isinstance(where, bool) else where)
        self._stop: weakref.finalize[[], AttentionPatch] | None = None

    def set(self, on: bool) -> None:
        """A monitored step begins, or ends."""
        if on and self._stop is None:
            listening = listen(partial(_tell, weakref.ref(self)))
            self._stop = weakref.finalize(self, listening.remove)
        elif not on and self._stop is not None:
            self._stop()
            self._stop = None

    def _name_of(self, module: nn.Module) -> tuple[str, bool] | None:
        """Name of a module of this monitor, and whether it is the reference's."""
        monitor = self._monitor
        if module in monitor.module_names:
            return monitor.module_names[module], False
        if module in monitor.reference_module_names:
            return monitor.reference_module_names[module], True
        return None

    def take(self, call: AttentionCall) -> None:
        """One attention was computed."""
        monitor = self._monitor
        if not monitor.current_step_monitored:
            return
        found = owner_of(call.frame, self._name_of)
        if found is None or not self._pattern.match(found[0]):
            return
        name, is_reference = found
        if monitor._is_excluded(name) or not (monitor.is_monitoring() or is_reference):
            return
        if call.arguments is None:
            monitor.logger.warning(
                "Step %s: nested tensors in the attention of %s", monitor.current_step, name
            )
            return
        query, key, mask, is_causal, scale = call.arguments
        monitor_heads(
            monitor,
            name,
            query,
            key,
            call.value,
            mask,
            is_causal=is_causal,
            scale=scale,
            activation=call.by_head(),
            is_reference=is_reference,
        )


def _tell(patch: weakref.ref[AttentionPatch], call: AttentionCall) -> None:
    listening = patch()
    if listening is not None:
        listening.take(call)
