"""A monitor with two metrics, a count of hooks, and a module that logs a value of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchtap import ModuleMonitor, MonitorMixin


def watching(model: nn.Module, **options: Any) -> ModuleMonitor:
    options.setdefault("monitor_step_fn", lambda step: True)
    monitor = ModuleMonitor(**options)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_activation_metric("norm", lambda x: x.norm())
    return monitor


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Scaled(nn.Module, MonitorMixin):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        if self.is_monitoring:
            monitor = self.get_module_monitor()
            assert monitor is not None
            monitor.log_tensor("custom/scaled", y)
        return y
