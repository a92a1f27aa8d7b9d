"""``torch_module_monitor.refined_coordinate_check``."""

from __future__ import annotations

from torchtap.monitors.module_monitor import HooksManager, ModuleMonitor, RefinedCoordinateCheck, l2_norm

__all__ = ["HooksManager", "ModuleMonitor", "RefinedCoordinateCheck", "l2_norm"]
