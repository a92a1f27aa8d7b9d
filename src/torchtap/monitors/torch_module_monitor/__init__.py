"""The import names of the ``torch-module-monitor`` package, for programs that keep them.

``stand_in()`` makes ``import torch_module_monitor`` and ``from torch_module_monitor.storage import ...`` find
torchtap, in this process. Every name here is the object that ``torchtap`` exports.
"""

from __future__ import annotations

import sys

from torchtap.monitors.module_monitor import (
    HooksManager,
    ModuleMonitor,
    MonitorMixin,
    RefinedCoordinateCheck,
    StorageManager,
    monitor_scaled_dot_product_attention,
)
from torchtap.monitors.torch_module_monitor import (
    attention,
    hooks,
    monitor,
    refined_coordinate_check,
    storage,
    utils,
)

__all__ = [
    "HooksManager",
    "ModuleMonitor",
    "MonitorMixin",
    "RefinedCoordinateCheck",
    "StorageManager",
    "attention",
    "hooks",
    "monitor",
    "monitor_scaled_dot_product_attention",
    "refined_coordinate_check",
    "stand_in",
    "storage",
    "utils",
]

__version__ = "0.1.0"  # of the package whose names these are

_SUBMODULES = (attention, hooks, monitor, refined_coordinate_check, storage, utils)


def stand_in() -> None:
    """From now on ``torch_module_monitor`` is torchtap, in this process."""
    sys.modules["torch_module_monitor"] = sys.modules[__name__]
    for module in _SUBMODULES:
        sys.modules[f"torch_module_monitor.{module.__name__.rpartition('.')[2]}"] = module
