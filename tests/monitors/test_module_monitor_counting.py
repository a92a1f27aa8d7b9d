"""What is counted, and how often: repeated, silenced and unmonitored calls."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models import GPT, Thrice, mlp
from tests.monitors.module_monitoring import Scaled, watching
from torch import Tensor, nn

from torchtap import ModuleMonitor, MonitorMixin, RefinedCoordinateCheck


@pytest.mark.parametrize("how", ["reentrant", "plain"])
def test_a_checkpointed_module_counts_once(how: str) -> None:
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x.mean()

    model = GPT(layers=1, checkpointed=how)
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", counted, metric_regex=r"blocks\.0\.ln1")
    monitor.begin_step(0)
    model(torch.randint(0, 11, (2, 4))).sum().backward()
    monitor.end_step()
    assert len(calls) == 1


def test_a_module_that_is_called_several_times_is_compared_call_by_call() -> None:
    model = Thrice()
    reference = copy.deepcopy(model)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm", lambda a, b: (a - b).norm())
    with torch.no_grad():
        model.shared.weight.add_(0.3)
    x = torch.randn(2, 5)
    monitor.begin_step(0)
    reference(x)
    model(x)
    monitor.end_step()
    expected, y, z = [], x, x
    for _ in range(3):
        y, z = model.shared(y), reference.shared(z)
        expected.append((y - z).norm().item())
        y, z = torch.tanh(y), torch.tanh(z)
    got = monitor.get_step_metrics()["activation_difference/shared/norm"]
    assert got == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_a_reference_run_under_no_monitor_is_compared_with() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm", lambda a, b: (a - b).norm())
    check = RefinedCoordinateCheck(monitor)
    with torch.no_grad():
        model[0].weight.add_(0.1)
    x = torch.randn(2, 7)
    monitor.begin_step(0)
    with monitor.no_monitor():
        reference(torch.randn(2, 7))
        reference(x)
    model(x)
    check.refined_coordinate_check()
    monitor.end_step()
    got = monitor.get_step_metrics()
    assert got["activation_difference/0/norm"] == pytest.approx(
        (model[0](x) - reference[0](x)).norm().item(), rel=1e-5
    )
    assert got["RCC (W_t-W_0)x_t/0/l2norm"] > 0
    assert got["RCC W_0(x_t-x_0)/0/l2norm"] == 0


def test_a_no_monitor_inside_another_does_not_end_it() -> None:
    monitor = watching(mlp())
    monitor.begin_step(0)
    with monitor.no_monitor():
        with monitor.no_monitor():
            pass
        assert not monitor.is_monitoring()
    assert monitor.is_monitoring()


def test_a_mixin_without_a_monitor_is_not_monitoring() -> None:
    class First(MonitorMixin, nn.Linear):
        pass

    assert First(3, 2)(torch.ones(3)).shape == (2,)
    assert not First(3, 2).is_monitoring
    assert Scaled()(torch.ones(2)).tolist() == [1.0, 2.0]
    assert Scaled().get_module_monitor() is None
    assert not Scaled().is_monitoring
