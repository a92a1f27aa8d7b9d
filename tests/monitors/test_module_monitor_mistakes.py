"""Bad input: errors that name the metric and the module."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models import mlp
from tests.monitors.module_monitoring import watching
from torch import nn

import torchtap as tt
from torchtap import ModuleMonitor


def test_a_metric_is_added_once() -> None:
    monitor = ModuleMonitor()
    for add in (
        monitor.add_activation_metric,
        monitor.add_activation_difference_metric,
        monitor.add_parameter_metric,
        monitor.add_parameter_difference_metric,
        monitor.add_gradient_metric,
    ):
        add("m", lambda *x: x[0].mean())
        with pytest.raises(ValueError, match="metric m already exists"):
            add("m", lambda *x: x[0].mean())


def test_a_monitored_step_needs_a_module() -> None:
    with pytest.raises(ValueError, match="No module to monitor"):
        ModuleMonitor(monitor_step_fn=lambda step: True).begin_step(0)


def test_steps_only_grow() -> None:
    monitor = watching(mlp())
    monitor.begin_step(5)
    with pytest.raises(ValueError, match="Step 4 cannot be smaller than the current step 5"):
        monitor.begin_step(4)


def test_a_metric_that_raises_is_named_with_its_module() -> None:
    model = mlp()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("broken", lambda x: x.no_such_thing(), metric_regex="2")
    monitor.add_parameter_metric("broken", lambda p: p / "x", metric_regex=r"0\.weight")
    monitor.begin_step(0)
    with pytest.raises(tt.MetricError, match=r"activations of module 2.*metric broken") as caught:
        model(torch.randn(2, 7))
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight.*metric broken"):
        monitor.monitor_parameters()


def test_a_metric_that_gives_no_number_is_named_with_its_module() -> None:
    model = mlp()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("text", lambda x: "large", metric_regex="1")
    monitor.add_gradient_metric("rows", lambda g: g.sum(-1), metric_regex=r"0\.weight")
    monitor.begin_step(0)
    with pytest.raises(tt.MetricError, match=r"metric text .* of module 1 .*str"):
        model(torch.randn(2, 7))
    with monitor.no_monitor():
        model(torch.randn(2, 7)).sum().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight.*metric rows.*shape \(9,\)"):
        monitor.monitor_gradients()


def test_a_reference_of_another_structure_is_refused_by_name() -> None:
    monitor = watching(mlp())
    with pytest.raises(ValueError, match=r"same structure.*'3' \(only in the reference\)"):
        monitor.set_reference_module(nn.Sequential(*mlp(), nn.ReLU()))
    assert not monitor.has_reference_module()
    with pytest.raises(ValueError, match="set the monitored module before"):
        ModuleMonitor().set_reference_module(mlp())


def test_a_second_module_and_no_module_are_refused() -> None:
    monitor = watching(mlp())
    with pytest.raises(ValueError, match="already been set"):
        monitor.set_module(mlp())
    with pytest.raises(ValueError, match="cannot be None"):
        ModuleMonitor().set_module(None)  # type: ignore[arg-type]


def test_a_reference_called_twice_in_a_micro_batch_is_an_error() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    monitor.begin_step(0)
    reference(torch.randn(2, 7))
    with pytest.raises(RuntimeError, match="already stored"):
        reference(torch.randn(2, 7))
    monitor.after_micro_batch()
    reference(torch.randn(2, 7))
