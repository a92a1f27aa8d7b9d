"""The ready-made recorders: `Monitor` for layers at chosen epochs and batches, `ModuleMonitor` for numbers of every
module, `LayerRecorder` for a model's layers pass by pass. Each is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "HooksManager": "module_monitor",
    "LayerRecorder": "layers.recorder",
    "ModuleMonitor": "module_monitor",
    "Monitor": "monitor.monitor",
    "MonitorMixin": "module_monitor",
    "MonitoredTrainer": "monitor.trainer",
    "RefinedCoordinateCheck": "module_monitor",
    "StorageManager": "module_monitor",
    "TrainingReport": "monitor.trainer",
    "get_layer_hidden_states": "layers.recorder",
    "monitor_scaled_dot_product_attention": "module_monitor",
    "open_layers": "layers.files",
    "record_layers": "layers.recorder",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'torchtap.monitors' has no attribute {name!r}")
    return getattr(import_module(f"torchtap.monitors.{home}"), name)


def __dir__() -> list[str]:
    return __all__
