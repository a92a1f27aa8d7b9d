"""What a `ModuleMonitor` does with each output that the walker shows it: the hot path of a monitored step."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch import Tensor

from torchtap.monitors.module_monitor.ledger import BoundMetrics

if TYPE_CHECKING:
    from torchtap.monitors.module_monitor.monitor import ModuleMonitor

__all__ = ["Visited", "take_output", "take_reference_output"]


@final
class Visited:
    """A module of a monitored model, and the metrics that were found for it."""

    __slots__ = ("bound", "edition", "monitor", "name")

    def __init__(self, monitor: ModuleMonitor, name: str) -> None:
        self.monitor = monitor
        self.name = name
        self.bound: BoundMetrics | None = None
        self.edition = -1  # of the metrics, when they were looked up


def take_output(visited: Visited, output: object) -> None:
    """A module has returned this."""
    monitor = visited.monitor
    if not monitor.within_monitoring_window:
        return
    if monitor.reference_module is not None or monitor._given is not None or type(output) is not Tensor:
        monitor._take_output(visited.name, output)
        return
    table = monitor._activations
    if visited.edition != table.edition:
        visited.bound = table.at("activation", visited.name)
        visited.edition = table.edition
    bound = visited.bound
    if bound is not None and bound.metrics:
        monitor._ledger.take(bound, output)


def take_reference_output(visited: Visited, output: object) -> None:
    """A module of the reference has returned this. Under no_monitor, too: that is where a reference is run."""
    monitor = visited.monitor
    if monitor.current_step_monitored and not monitor.ignore_reference_module_activations:
        monitor._take_reference_output(visited.name, output)
