"""``torch_module_monitor.attention``."""

from __future__ import annotations

from torchtap.monitors.module_monitor.attention import monitor_scaled_dot_product_attention
from torchtap.monitors.module_monitor.monitor import ModuleMonitor

__all__ = ["ModuleMonitor", "monitor_scaled_dot_product_attention"]
