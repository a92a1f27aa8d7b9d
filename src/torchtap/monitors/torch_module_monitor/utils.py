"""``torch_module_monitor.utils``."""

from __future__ import annotations

from torchtap.monitors.module_monitor.naming import extract_activation_tensor

__all__ = ["extract_activation_tensor"]
