"""Ready-made recorders: `Monitor` for layers at given epochs and batches, `ModuleMonitor` for metrics of every module,
`LayerRecorder` for a model's layers pass by pass. Each is imported at its first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtap.lazy import names_from

if TYPE_CHECKING:
    from torchtap.monitors.attention_heads import (
        monitor_scaled_dot_product_attention as monitor_scaled_dot_product_attention,
    )
    from torchtap.monitors.coordinate_check import RefinedCoordinateCheck as RefinedCoordinateCheck
    from torchtap.monitors.layers import LayerRecorder as LayerRecorder
    from torchtap.monitors.layers import get_layer_hidden_states as get_layer_hidden_states
    from torchtap.monitors.layers import open_layers as open_layers
    from torchtap.monitors.layers import record_layers as record_layers
    from torchtap.monitors.metric_storage import StorageManager as StorageManager
    from torchtap.monitors.module_monitor import HooksManager as HooksManager
    from torchtap.monitors.module_monitor import ModuleMonitor as ModuleMonitor
    from torchtap.monitors.module_monitor import MonitorMixin as MonitorMixin
    from torchtap.monitors.monitor import Monitor as Monitor
    from torchtap.monitors.trainer import MonitoredTrainer as MonitoredTrainer
    from torchtap.monitors.trainer import TrainingReport as TrainingReport

_HOME = {
    "HooksManager": "module_monitor",
    "LayerRecorder": "layers",
    "ModuleMonitor": "module_monitor",
    "Monitor": "monitor",
    "MonitorMixin": "module_monitor",
    "MonitoredTrainer": "trainer",
    "RefinedCoordinateCheck": "coordinate_check",
    "StorageManager": "metric_storage",
    "TrainingReport": "trainer",
    "get_layer_hidden_states": "layers",
    "monitor_scaled_dot_product_attention": "attention_heads",
    "open_layers": "layers",
    "record_layers": "layers",
}
__all__ = list(_HOME)
__getattr__ = names_from(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
