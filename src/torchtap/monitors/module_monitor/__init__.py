"""``ModuleMonitor`` and what belongs to it: all of the ``torch-module-monitor`` package, on torchtap's core."""

from __future__ import annotations

from torchtap.monitors.module_monitor.attention import monitor_scaled_dot_product_attention
from torchtap.monitors.module_monitor.hooks import HooksManager
from torchtap.monitors.module_monitor.mixin import MonitorMixin
from torchtap.monitors.module_monitor.monitor import ModuleMonitor
from torchtap.monitors.module_monitor.naming import default_format_module_name_fn
from torchtap.monitors.module_monitor.rcc import RefinedCoordinateCheck, l2_norm
from torchtap.monitors.module_monitor.storage import StorageManager

__all__ = [
    "HooksManager",
    "ModuleMonitor",
    "MonitorMixin",
    "RefinedCoordinateCheck",
    "StorageManager",
    "default_format_module_name_fn",
    "l2_norm",
    "monitor_scaled_dot_product_attention",
]
