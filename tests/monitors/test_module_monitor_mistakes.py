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
    with pytest.raises(tt.MetricError, match=r"^2:output: metric 'broken'") as caught:
        model(torch.randn(2, 7))
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(RuntimeError, match=r"^parameter/0\.weight: metric 'broken'"):
        monitor.monitor_parameters()


def test_a_metric_that_gives_no_number_is_named_with_its_module() -> None:
    model = mlp()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("text", lambda x: "large", metric_regex="1")
    monitor.add_gradient_metric("rows", lambda g: g.sum(-1), metric_regex=r"0\.weight")
    monitor.begin_step(0)
    with pytest.raises(tt.MetricError, match=r"^1:output: metric 'text' returned a str"):
        model(torch.randn(2, 7))
    with monitor.no_monitor():
        model(torch.randn(2, 7)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^gradient/0\.weight: metric 'rows'.*shape \(9,\)"):
        monitor.monitor_gradients()


def test_a_metric_that_changes_its_argument_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("peak", lambda y: y.abs_().max())
    monitor.begin_step(0)
    with pytest.raises(tt.MetricError, match=r"^0:output: metric 'peak' changed the value in place"):
        model(torch.randn(3, 4))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("median", r"'median' is not one of the statistics count, mean, std"),
        (3, "3 is neither a function nor the name of a statistic"),
    ],
)
def test_what_is_no_metric_is_refused_when_it_is_added(metric: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModuleMonitor().add_activation_metric("m", metric)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes no aggregation function"):
        ModuleMonitor().add_activation_metric("m", "l2", metric_aggregation_fn=lambda values: values.max())
    with pytest.raises(ValueError, match="is not a regular expression"):
        ModuleMonitor().add_parameter_metric("m", "l2", metric_regex="(")


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
