"""``torch_module_monitor.hooks``."""

from __future__ import annotations

from torchtap.monitors.module_monitor.hooks import HooksManager

__all__ = ["HooksManager"]
