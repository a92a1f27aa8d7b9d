"""What the refined coordinate check does beside its numbers: it runs no more than it has to, and leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.monitors.coordinate_checks import checking
from tests.monitors.module_monitoring import watching
from torch import nn
from torch.nn import functional

from torchtap import RefinedCoordinateCheck


def test_a_check_of_a_container_with_dropout_uses_up_no_random_numbers() -> None:
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
