"""``torch_module_monitor.storage``."""

from __future__ import annotations

from torchtap.monitors.module_monitor.storage import StorageManager

__all__ = ["StorageManager"]
