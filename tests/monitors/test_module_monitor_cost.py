"""What a step costs: no hook when idle, one pass over each value, formulas in place of calls, one read."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import pytest
import torch
from tests.models import mlp
from tests.monitors.module_monitoring import hooks_on, watching
from torch import Tensor, nn

from torchtap import ModuleMonitor, RefinedCoordinateCheck
from torchtap.monitors.module_monitor import ledger


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


def test_plain_metrics_share_one_pass_over_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, ...]] = []
    if ledger.kernel.native is None:
        pytest.skip("the native kernel is not built")
    for name in ("_put", "_measure"):  # the two ways into the kernel; the second is for what the first leaves
        way = getattr(ledger.Ledger, name)

        def counted(self: Any, value: Tensor, way: Any = way) -> int:
            row: int = way(self, value)
            if row >= 0:
                passes.append(tuple(value.shape))
            return row

        monkeypatch.setattr(ledger.Ledger, name, counted)
    model = mlp()
    monitor = watching(model)
    monitor.add_activation_metric("std", torch.std)
    monitor.add_activation_metric("peak", lambda x: x.abs().max())
    monitor.begin_step(0)
    model(torch.randn(5, 7))
    monitor.end_step()
    # One look for each of four modules, not for each of four metrics; the model's output, which is that of its last
    # layer, is recognised by native code; where that cannot take tensors as they are, it is recognised before.
    recognised = [] if ledger.kernel.make_taker() is None else [(5, 3)]
    assert passes == [(5, 9), (5, 9), (5, 3), *recognised]
    assert len(monitor.get_step_metrics()) == 16


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


@pytest.mark.parametrize(
    "metric",
    [
        lambda x: x.mean(),
        lambda x: x.std(),
        lambda x: x.var(unbiased=False),
        lambda x: x.norm(),
        lambda x: x.norm(p=1),
        lambda x: x.abs().max(),
        lambda x: torch.linalg.vector_norm(x, ord=math.inf),
        lambda x: x.pow(2).mean().sqrt(),
        lambda x: (x**2).sum(),
        lambda x: (x * x).mean(),
        lambda x: x.max() - x.min(),
        lambda x: (x == 0).float().mean(),
        lambda x: abs(x).mean(),
        lambda x: 2 * x.detach().float().norm().item() + 1,
        lambda x: x.norm() / x.numel() ** 0.5,
        torch.mean,
        torch.Tensor.std,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_formula_gives_what_the_expression_gives(metric: Any, dtype: torch.dtype) -> None:
    x = torch.randn(7, 9, dtype=dtype)
    x[0, :3] = 0
    model = nn.Identity()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("m", metric)
    monitor.begin_step(0)
    model(x)
    monitor.end_step()
    assert monitor.get_step_metrics()["activation/[root module]/m"] == pytest.approx(
        float(metric(x)), rel=1e-6
    )
