"""The refined coordinate check: its numbers, and that neither model is changed by it."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models import mlp
from tests.monitors.coordinate_checks import MODELS, checking
from tests.monitors.module_monitoring import watching
from torch import Tensor, nn
from torch.nn import functional

from torchtap import ModuleMonitor, RefinedCoordinateCheck


@pytest.mark.parametrize("name", ["cnn in place", "changed in place", "gpt"])
def test_the_model_gives_and_learns_the_same_with_the_check(name: str) -> None:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), batch()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.2)
    monitor, reference, check = checking(model)
    for step in range(3):
        monitor.begin_step(step)
        reference(x)
        y = model(x)
        check.refined_coordinate_check()
        assert torch.equal(y, twin(x))
        y.sum().backward()
        monitor.end_step()
    twin.zero_grad()
    model.zero_grad()
    twin(x).sum().backward()
    model(x).sum().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_a_reference_that_runs_after_the_model_is_compared_with() -> None:
    monitor, reference, check = checking(mlp())
    x = torch.randn(5, 7)
    for step, reference_first in enumerate([True, True, False]):
        monitor.begin_step(step)
        for part in [reference, monitor.module] if reference_first else [monitor.module, reference]:
            part(x)
        check.refined_coordinate_check()
        monitor.end_step()
    everything = monitor.get_all_metrics()
    assert everything[2] == pytest.approx(everything[1], rel=1e-6)


def test_a_pass_of_the_reference_is_compared_with_one_pass_of_the_model() -> None:
    monitor, reference, check = checking(mlp())
    first, second = torch.randn(5, 7), torch.randn(5, 7)
    for step in range(2):
        monitor.begin_step(step)
        with monitor.no_monitor():
            reference(first)
        monitor.module(first)
        monitor.module(second)  # the last pass counts, and its reference comes later
        with monitor.no_monitor():
            reference(second)
        check.refined_coordinate_check()
        monitor.end_step()
    assert monitor.get_all_metrics()[1] == pytest.approx(monitor.get_all_metrics()[0], rel=1e-6)


def test_micro_batches_are_averaged_over_all_their_rows() -> None:
    monitor, reference, check = checking(mlp())
    x = torch.randn(6, 7)
    for step, sizes in enumerate([[6], [2, 4], [3, 3]]):
        monitor.begin_step(step)
        for part in x.split(sizes):
            reference(part)
            monitor.module(part)
            check.refined_coordinate_check()
            monitor.after_micro_batch()
        monitor.end_step()
    whole, *parts = monitor.get_all_metrics().values()
    for metrics in parts:
        assert metrics == pytest.approx(whole, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("part", [0, 1])
def test_a_hook_that_changes_what_the_reference_gives_is_heard(part: int) -> None:
    monitor, reference, check = checking(nn.Sequential(nn.Linear(7, 4), nn.Tanh()))
    reference[part].register_forward_hook(lambda module, args, output: output * 3)
    x = torch.randn(5, 7)
    inputs = [x, monitor.module[0](x)]
    expected = monitor.module[part](inputs[part]) - reference[part](inputs[part])
    for step in range(2):
        monitor.begin_step(step)
        reference(x)
        monitor.module(x)
        check.refined_coordinate_check()
        monitor.end_step()
        assert monitor.get_step_metrics()[f"RCC (W_t-W_0)x_t/{part}/l2norm"] == pytest.approx(
            expected.norm(dim=-1).mean().item(), rel=1e-5
        )


def test_the_terms_without_a_bias_are_those_of_the_weight() -> None:
    model = nn.Sequential(nn.Linear(7, 4), nn.Linear(4, 3, bias=False))
    monitor, reference, check = checking(model)
    x, z = torch.randn(5, 7), torch.randn(5, 7)
    monitor.begin_step(0)
    reference(z)
    model(x)
    check.refined_coordinate_check()
    monitor.end_step()
    got = monitor.get_step_metrics()
    now, before = model[0].weight, reference[0].weight
    expected = {
        "RCC (W_t-W_0)x_t/0.weight/l2norm": functional.linear(x, now - before),
        "RCC W_0(x_t-x_0)/0.weight/l2norm": functional.linear(x - z, before),
        "RCC (W_t-W_0)x_t/0.weight/W_t x_t/l2norm": functional.linear(x, now),
        "RCC W_0(x_t-x_0)/0.weight/W_0 x_0/l2norm": functional.linear(z, before),
        "RCC (x_t-x_0)/0/l2norm": x - z,
        "RCC x_t/1/l2norm": model[0](x),
    }
    for key, value in expected.items():
        assert got[key] == pytest.approx(value.norm(dim=-1).mean().item(), rel=1e-5), key
    assert got["RCC (W_t-W_0)x_t/1.weight/l2norm"] == got["RCC (W_t-W_0)x_t/1/l2norm"]


def test_the_coordinate_check_needs_both_models_and_both_passes() -> None:
    with pytest.raises(ValueError, match="Set the module"):
        RefinedCoordinateCheck(ModuleMonitor())
    model = mlp()
    monitor = watching(model)
    with pytest.raises(ValueError, match="Set the reference"):
        RefinedCoordinateCheck(monitor)
    monitor.set_reference_module(copy.deepcopy(model))
    check = RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    with pytest.raises(ValueError, match="No inputs found"):
        check.refined_coordinate_check()
    model(torch.randn(2, 7))
    with pytest.raises(ValueError, match="module 0 ran, but the reference's did not"):
        check.refined_coordinate_check()


def test_the_coordinate_check_covers_what_the_peer_cannot_run() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.attention(x, x, x, need_weights=False)
            return self.lstm(y)[0]

    model = Attending()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        model.attention.in_proj_weight[:8].add_(0.1)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    x = torch.randn(2, 3, 8)
    monitor.begin_step(0)
    reference(x)
    model(x)
    check.refined_coordinate_check()
    monitor.end_step()
    got = monitor.get_step_metrics()
    moved = functional.linear(x, torch.full((8, 8), 0.1)).norm(dim=-1).mean().item()
    assert got["RCC (W_t-W_0)x_t/attention.q_proj.weight/l2norm"] == pytest.approx(moved, rel=1e-4)
    assert got["RCC (W_t-W_0)x_t/attention.k_proj.weight/l2norm"] == 0
    assert got["RCC W_0(x_t-x_0)/lstm[0]/l2norm"] > 0
