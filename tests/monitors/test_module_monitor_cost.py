"""The cost of a step: no hook when idle, nothing held, one read."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from tests.models import mlp
from tests.monitors.module_monitoring import hooks_on, watching
from torch import Tensor

from torchtap import RefinedCoordinateCheck


def test_a_step_that_is_not_monitored_carries_no_hook() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    monitor = watching(model, monitor_step_fn=lambda step: step == 1)
    monitor.set_reference_module(reference)
    RefinedCoordinateCheck(monitor)
    monitor.remove_reference_module()
    assert not monitor.begin_step(0)
    assert hooks_on(model) == 0
    assert monitor.begin_step(1)
    assert hooks_on(model) > 0
    monitor.end_step()
    monitor.begin_step(2)
    assert hooks_on(model) == hooks_on(reference) == 0


def test_an_output_is_gone_as_soon_as_the_training_lets_go_of_it() -> None:
    model = mlp()
    monitor = watching(model)
    monitor.begin_step(0)
    output = model(torch.randn(4, 7))
    seen = weakref.ref(output)
    del output
    assert seen() is None
    monitor.end_step()


def test_no_value_is_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a number was read by itself")

    model, x = mlp(), torch.randn(5, 7)
    monitor = watching(model)
    monitor.add_activation_metric("rows", lambda y: y.norm(dim=-1).mean())
    monitor.add_parameter_metric("norm", lambda p: p.norm())
    monitor.add_parameter_metric("median", lambda p: p.median())
    monitor.add_gradient_metric("norm", lambda g: g.norm())
    monitor.begin_step(0)
    model(x).sum().backward()
    monkeypatch.setattr(Tensor, "item", refuse)
    monkeypatch.setattr(Tensor, "__float__", refuse)
    monitor.monitor_parameters()
    monitor.monitor_gradients()
    monitor.end_step()
    monkeypatch.undo()
    assert monitor.get_step_metrics()["parameter/0.weight/norm"] == pytest.approx(
        model[0].weight.norm().item()
    )
