"""A monitor with a reference and a coordinate check, and models on which a check is not easy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tests.models import CNN, GPT, Tagger, mlp
from torch import Tensor, nn

from torchtap import ModuleMonitor, RefinedCoordinateCheck


def checking(model: nn.Module, **options: Any) -> tuple[ModuleMonitor, nn.Module, RefinedCoordinateCheck]:
    options.setdefault("monitor_step_fn", lambda step: True)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    monitor = ModuleMonitor(**options)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    return monitor, reference, RefinedCoordinateCheck(monitor)


class Writing(nn.Module):
    """Writes into its input, which is the output of the module before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.second(self.first(x))


class Changed(nn.Module):
    """A value is changed in place after the module that gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.writing, self.norm = nn.Linear(6, 6), Writing(), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.writing(self.fc(x)))
        y.mul_(2)
        return y


class Pair(NamedTuple):
    value: Tensor
    text: str


class Named(nn.Module):
    """Takes and gives values inside something else than a tuple, a list or a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.fc(pair.value), pair.text)


class ChangedInside(nn.Module):
    """Such a value is changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Named(), Named()

    def forward(self, x: Tensor) -> Tensor:
        pair = self.second(self.first(Pair(x * 1, "text")))
        pair.value.mul_(2)
        return pair.value


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(5, 7)),
    "nested": (
        lambda: nn.Sequential(mlp(), nn.Sequential(nn.ReLU(), nn.Linear(3, 2))),
        lambda: torch.randn(5, 7),
    ),
    "cnn in place": (lambda: CNN(inplace=True), lambda: torch.randn(2, 3, 8, 8)),
    "gpt": (GPT, lambda: torch.randint(0, 11, (2, 6))),
    "tuples": (Tagger, lambda: torch.randn(2, 5, 8)),
    "changed in place": (Changed, lambda: torch.randn(4, 6)),
    "changed inside": (ChangedInside, lambda: torch.randn(4, 6)),
    "half": (lambda: mlp().bfloat16(), lambda: torch.randn(5, 7).bfloat16()),
}
