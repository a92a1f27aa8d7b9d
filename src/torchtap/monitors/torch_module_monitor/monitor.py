"""``torch_module_monitor.monitor``."""

from __future__ import annotations

from torchtap.monitors.module_monitor import (
    HooksManager,
    ModuleMonitor,
    MonitorMixin,
    StorageManager,
    default_format_module_name_fn,
)

__all__ = ["HooksManager", "ModuleMonitor", "MonitorMixin", "StorageManager", "default_format_module_name_fn"]
