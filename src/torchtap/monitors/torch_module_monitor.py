"""The import names of the ``torch-module-monitor`` package, for programs that keep their import lines.

``stand_in()`` makes ``import torch_module_monitor`` and ``from torch_module_monitor.storage import ...`` find
torchtap in this process. Every name here is the object that ``torchtap`` exports.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torchtap.monitors.attention_heads import monitor_scaled_dot_product_attention
from torchtap.monitors.coordinate_check import RefinedCoordinateCheck, l2_norm
from torchtap.monitors.metric_storage import StorageManager
from torchtap.monitors.module_monitor import (
    HooksManager,
    ModuleMonitor,
    MonitorMixin,
    default_format_module_name_fn,
    extract_activation_tensor,
)

__all__ = [
    "HooksManager",
    "ModuleMonitor",
    "MonitorMixin",
    "RefinedCoordinateCheck",
    "StorageManager",
    "monitor_scaled_dot_product_attention",
    "stand_in",
]

__version__ = "0.1.0"  # of the package whose names these are

# The names in each submodule of the package.
_SUBMODULES = {
    "attention": (ModuleMonitor, monitor_scaled_dot_product_attention),
    "hooks": (HooksManager,),
    "monitor": (HooksManager, ModuleMonitor, MonitorMixin, StorageManager, default_format_module_name_fn),
    "refined_coordinate_check": (HooksManager, ModuleMonitor, RefinedCoordinateCheck, l2_norm),
    "storage": (StorageManager,),
    "utils": (extract_activation_tensor,),
}


def stand_in(package: str = "torch_module_monitor") -> None:
    """Make ``import torch_module_monitor`` find torchtap, in this process."""
    here = sys.modules[package] = sys.modules[__name__]
    for name, exported in _SUBMODULES.items():
        submodule = ModuleType(f"{package}.{name}", f"``torch_module_monitor.{name}``.")
        submodule.__dict__.update({each.__name__: each for each in exported})
        sys.modules[submodule.__name__] = submodule
        setattr(here, name, submodule)


stand_in(__name__)
