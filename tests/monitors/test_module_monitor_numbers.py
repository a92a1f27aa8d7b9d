"""The numbers themselves: any type that a metric gives, any precision, values as they were."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests.models import CNN, mlp
from tests.monitors.module_monitoring import watching
from torch import nn

from torchtap import ModuleMonitor


def test_several_scalars_are_logged_at_once() -> None:
    monitor = watching(mlp())
    monitor.begin_step(0)
    monitor.log_scalars({"loss": torch.tensor(1.5), "rate": 0.1})
    monitor.end_step()
    monitor.log_scalars({"late": 2}, force=True)
    assert monitor.get_step_metrics() == {"loss": 1.5, "rate": 0.1, "late": 2}


def test_gradients_are_monitored_though_the_first_parameter_misses_the_pattern() -> None:
    model = mlp()
    monitor = watching(model)
    monitor.add_gradient_metric("norm", lambda g: g.norm(), metric_regex=r"2\.bias")
    monitor.begin_step(0)
    model(torch.randn(2, 7)).sum().backward()
    monitor.monitor_gradients()
    monitor.end_step()
    assert [key for key in monitor.get_step_metrics() if key.startswith("gradient/")] == [
        "gradient/2.bias/norm"
    ]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (lambda x: x.numel() > 3, 1.0),
        (lambda x: int(x.argmax()), 1.0),
        (lambda x: x.mean().item(), 2.5),
        (lambda x: (x > 2).sum(), 2.0),
        (lambda x: float(x.sum()), 10.0),
    ],
    ids=["bool", "int", "item", "count", "float"],
)
def test_a_metric_may_give_any_number(metric: Any, expected: float) -> None:
    model = nn.Identity()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("m", metric)
    monitor.begin_step(0)
    model(torch.tensor([1.0, 4.0, 2.0, 3.0]))
    monitor.end_step()
    assert monitor.get_step_metrics() == {"activation/[root module]/m": expected}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_in_half_precision_does_not_overflow(dtype: torch.dtype) -> None:
    model = nn.Identity()
    monitor = watching(model)
    monitor.begin_step(0)
    x = torch.full((40, 50), 3000.0, dtype=dtype)
    model(x)
    monitor.end_step()
    assert monitor.get_step_metrics()["activation/[root module]/norm"] == pytest.approx(
        x.double().norm().item()
    )


def test_parameter_norms_in_half_precision_do_not_overflow() -> None:
    model = nn.Linear(50, 40).half()
    with torch.no_grad():
        model.weight.fill_(3000.0)
    monitor = watching(model)
    monitor.add_parameter_metric("norm", lambda p: p.norm())
    monitor.begin_step(0)
    monitor.monitor_parameters()
    monitor.end_step()
    assert monitor.get_step_metrics()["parameter/weight/norm"] == pytest.approx(
        3000 * math.sqrt(2000), rel=1e-5
    )


def test_autocast_gives_the_numbers_of_what_the_model_computed() -> None:
    model, x = mlp(), torch.randn(4, 7)
    monitor = watching(model)
    monitor.begin_step(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    monitor.end_step()
    assert y.dtype == torch.bfloat16
    assert monitor.get_step_metrics()["activation/2/norm"] == pytest.approx(
        y.double().norm().item(), rel=1e-5
    )


def test_a_value_that_is_changed_in_place_afterwards_counts_as_it_was() -> None:
    model = CNN(inplace=True)
    monitor = watching(model)
    monitor.add_activation_metric("sum of rows", lambda x: x.sum(dim=-1))
    monitor.begin_step(0)
    x = torch.randn(2, 3, 8, 8)
    model(x)
    monitor.end_step()
    model.eval()
    twin = copy.deepcopy(model).train()
    expected = twin.bn1(twin.conv1(x))
    assert monitor.get_step_metrics()["activation/bn1/norm"] == pytest.approx(
        expected.norm().item(), rel=1e-4
    )


def test_a_metric_that_changes_its_argument_does_not_change_the_model() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    expected = model(x)
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("peak", lambda y: y.abs_().max())
    monitor.begin_step(0)
    assert torch.equal(model(x), expected)
    monitor.end_step()
