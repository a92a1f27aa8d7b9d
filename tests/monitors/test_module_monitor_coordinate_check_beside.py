"""What the refined coordinate check does beside its numbers: it runs no more than it has to, and leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.models import mlp
from tests.monitors.coordinate_checks import checking
from tests.monitors.module_monitoring import watching
from torch import nn
from torch.nn import functional

from torchtap import RefinedCoordinateCheck


def counted(module: nn.Module) -> list[int]:
    calls: list[int] = []
    forward = type(module).forward

    class Counted(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            calls.append(1)
            return forward(self, *args)

    module.__class__ = Counted
    return calls


def test_nothing_is_computed_for_a_check_that_is_not_asked_for() -> None:
    monitor, reference, check = checking(mlp())
    x = torch.randn(5, 7)
    calls = counted(reference[0])
    asked = [True, False, False, True]
    ran = []
    for step, ask in enumerate(asked):
        monitor.begin_step(step)
        reference(x)
        monitor.module(x)
        if ask:
            check.refined_coordinate_check()
        monitor.end_step()
        ran.append(len(calls))
        calls.clear()
    # The second step could not know; the third does.
    assert ran == [2, 2, 1, 2]


def test_a_first_child_runs_once_for_itself_and_its_container() -> None:
    monitor, reference, check = checking(nn.Sequential(nn.Sequential(nn.Linear(7, 4), nn.ReLU())))
    calls = counted(reference[0][0])
    x = torch.randn(5, 7)
    for step in range(3):
        monitor.begin_step(step)
        reference(x)
        calls.clear()
        monitor.module(x)
        check.refined_coordinate_check()
        monitor.end_step()
        assert len(calls) == 1


def test_an_activation_function_is_not_run_again_and_has_no_share_of_its_own() -> None:
    monitor, reference, check = checking(nn.Sequential(nn.Linear(7, 4), nn.Tanh()))
    calls = counted(reference[1])
    other = RefinedCoordinateCheck(monitor)  # made after the class was changed: it runs the function
    x = torch.randn(5, 7)
    monitor.begin_step(0)
    reference(x)
    monitor.module(x)
    calls.clear()
    check.refined_coordinate_check()
    assert not calls
    other.refined_coordinate_check()
    assert calls
    monitor.end_step()
    got = monitor.get_step_metrics()
    assert got["RCC (W_t-W_0)x_t/1/l2norm"] == 0
    assert got["RCC W_0(x_t-x_0)/1/l2norm"] > 0


def test_a_check_where_it_happens_uses_up_no_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Sequential(nn.Dropout(0.5), nn.Linear(7, 3)))
    monitor, reference, check = checking(model)
    x, states = torch.randn(4, 7), []
    for step in range(2):
        monitor.begin_step(step)
        reference(x)
        torch.manual_seed(5)
        model(x)
        check.refined_coordinate_check()
        monitor.end_step()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert not any("forward" in module.__dict__ for module in reference.modules())


def test_an_unmonitored_step_gives_the_memory_back() -> None:
    monitor, reference, check = checking(mlp(), monitor_step_fn=lambda step: step % 2 == 0)
    x = torch.randn(9000, 7)
    monitor.begin_step(0)
    reference(x)
    monitor.module(x)
    check.refined_coordinate_check()
    monitor.end_step()
    pools = (check._copies, monitor._reference.copies)
    assert all(copies._pool.nbytes for copies in pools)
    monitor.begin_step(1)
    assert not any(copies._pool.nbytes for copies in pools)


def test_a_copy_that_is_held_on_to_is_not_written_over() -> None:
    monitor, reference, _ = checking(nn.Sequential(nn.Linear(256, 256)))
    kept = []
    for step in range(3):
        monitor.begin_step(step)
        x = torch.full((256, 256), float(step))
        with torch.no_grad():
            y = reference(x)
        kept.append((monitor.reference_module_activations["0"], y))
        monitor.end_step()
    for copied, value in kept:
        assert torch.equal(copied, value)


def test_the_coordinate_check_uses_up_no_random_numbers_and_leaves_the_reference_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(7, 3))
    reference = copy.deepcopy(model)
    monitor = watching(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    x = torch.randn(4, 7)
    monitor.begin_step(0)
    reference(x)
    model(x)
    before = torch.get_rng_state()
    check.refined_coordinate_check()
    assert torch.equal(torch.get_rng_state(), before)
    monitor.end_step()
    assert not any("forward" in module.__dict__ for module in reference.modules())
    got = monitor.get_step_metrics()
    hidden = functional.linear(x, model[0].weight).norm(dim=-1).mean().item()
    assert got["RCC (W_t-W_0)x_t/0.weight/W_t x_t/l2norm"] == pytest.approx(hidden, rel=1e-5)
    assert got["RCC (W_t-W_0)x_t/0/l2norm"] == got["RCC W_0(x_t-x_0)/0/l2norm"] == 0
