"""The numbers themselves: any type that a metric gives, any precision, values as they were."""

from __future__ import annotations

import copy
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


STATISTICS = {
    "count": lambda x: x.numel(),
    "mean": lambda x: x.mean(),
    "std": lambda x: x.std(),
    "min": lambda x: x.min(),
    "max": lambda x: x.max(),
    "absmax": lambda x: x.abs().max(),
    "l1": lambda x: x.abs().sum(),
    "l2": lambda x: x.norm(),
    "rms": lambda x: x.square().mean().sqrt(),
    "zeros": lambda x: (x == 0).double().mean(),
    "nans": lambda x: x.isnan().sum(),
    "infs": lambda x: x.isinf().sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_named_metric_is_the_statistic_of_torch_in_full_precision(dtype: torch.dtype) -> None:
    model = nn.Linear(30, 40).to(dtype)
    monitor = ModuleMonitor(monitor_step_fn=None)
    monitor.set_module(nn.Sequential(model, nn.Hardshrink(0.3)))
    for name in STATISTICS:
        monitor.add_activation_metric(name, name)
        monitor.add_parameter_metric(name, name)
        monitor.add_gradient_metric(name, name)
    monitor.begin_step(0)
    assert monitor.module is not None
    y = monitor.module(torch.randn(6, 30, dtype=dtype))
    y.float().sum().backward()
    monitor.monitor_parameters()
    monitor.monitor_gradients()
    monitor.end_step()
    got = monitor.get_step_metrics()
    values = {"activation/1": y, "parameter/0.weight": model.weight, "gradient/0.weight": model.weight.grad}
    for prefix, value in values.items():
        for name, by_torch in STATISTICS.items():
            expected = float(by_torch(value.detach().double()))
            assert got[f"{prefix}/{name}"] == pytest.approx(expected, rel=1e-6, abs=1e-9), (prefix, name)


def test_a_named_metric_of_a_difference_is_that_of_the_subtracted_values() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    monitor = ModuleMonitor(monitor_step_fn=None)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("rms", "rms")
    monitor.add_parameter_difference_metric("l2", "l2")
    x = torch.randn(4, 7)
    monitor.begin_step(0)
    reference(x)
    model(x)
    monitor.monitor_parameters()
    monitor.end_step()
    got = monitor.get_step_metrics()
    change = (model(x) - reference(x)).square().mean().sqrt().item()
    assert got["activation_difference/2/rms"] == pytest.approx(change, rel=1e-5)
    moved = (model[0].weight - reference[0].weight).norm().item()
    assert got["parameter_difference/0.weight/l2"] == pytest.approx(moved, rel=1e-5)
    assert got["parameter_difference/2.weight/l2"] == 0


def test_a_named_metric_is_over_all_micro_batches_and_a_function_is_averaged_over_them() -> None:
    model, batch = mlp(), torch.randn(6, 7)
    monitor = ModuleMonitor(monitor_step_fn=None)
    monitor.set_module(model)
    monitor.add_activation_metric("l2", "l2")
    monitor.add_activation_metric("norm", lambda x: x.norm())
    monitor.begin_step(0)
    for part in batch.chunk(3):
        model(part)
        monitor.after_micro_batch()
    monitor.end_step()
    got = monitor.get_step_metrics()
    assert got["activation/2/l2"] == pytest.approx(model(batch).norm().item(), rel=1e-5)
    norms = [model(part).norm().item() for part in batch.chunk(3)]
    assert got["activation/2/norm"] == pytest.approx(sum(norms) / 3, rel=1e-5)


def test_a_function_is_averaged_over_the_elements_of_all_calls() -> None:
    layer = nn.Linear(7, 7)
    monitor = ModuleMonitor(monitor_step_fn=None)
    monitor.set_module(nn.ModuleDict({"shared": layer}))
    monitor.add_activation_metric("rows", lambda x: x.norm(dim=-1))
    monitor.begin_step(0)
    inputs = [torch.randn(2, 7), torch.randn(5, 7)]
    for each in inputs:
        layer(each)
    monitor.end_step()
    expected = torch.cat([layer(each).norm(dim=-1) for each in inputs]).mean().item()
    assert monitor.get_step_metrics()["activation/shared/rows"] == pytest.approx(expected, rel=1e-5)


def test_autocast_gives_the_numbers_of_what_the_model_computed() -> None:
    model, x = mlp(), torch.randn(4, 7)
    monitor = ModuleMonitor(monitor_step_fn=None)
    monitor.set_module(model)
    monitor.add_activation_metric("l2", "l2")
    monitor.begin_step(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    monitor.end_step()
    assert y.dtype == torch.bfloat16
    assert monitor.get_step_metrics()["activation/2/l2"] == pytest.approx(y.double().norm().item(), rel=1e-5)


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
