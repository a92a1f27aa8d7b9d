"""The hooks that hand outputs of the module and of its reference to a `ModuleMonitor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from torchtap._torch import graph_task
from torchtap.monitors.module_monitor.hooks import LiveHook
from torchtap.monitors.module_monitor.ledger import BoundMetrics

if TYPE_CHECKING:
    from torchtap.monitors.module_monitor.monitor import ModuleMonitor

__all__ = ["OutputHook", "ReferenceHook"]


@final
class OutputHook(LiveHook):
    """Hands a module's output to the monitor."""

    def __init__(self, monitor: ModuleMonitor, name: str) -> None:
        self._monitor = monitor
        self._name = name
        self._bound: BoundMetrics | None = None
        self._edition = -1

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        monitor = self._monitor
        if not monitor.within_monitoring_window or graph_task() != -1:
            return
        if not (monitor._activations.listed or monitor._activation_differences.listed):
            return
        if monitor.reference_module is not None or monitor._given is not None or type(output) is not Tensor:
            monitor._take_output(self._name, output)
            return
        table = monitor._activations
        if self._edition != table.edition:
            self._bound = table.at("activation", self._name)
            self._edition = table.edition
        bound = self._bound
        if bound is not None and bound.metrics:
            monitor._ledger.take(bound, output)


@final
class ReferenceHook(LiveHook):
    """Hands an output of the reference to the monitor."""

    def __init__(self, monitor: ModuleMonitor, name: str) -> None:
        self._monitor = monitor
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        monitor = self._monitor
        # Under no_monitor, too: that is where a reference is run.
        wanted = monitor.current_step_monitored and not monitor.ignore_reference_module_activations
        if wanted and graph_task() == -1:
            monitor._take_reference_output(self._name, output)
