"""Hooks of a monitor and its coordinate check: no more than somebody needs, and nothing is missed for it."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models import mlp
from tests.monitors.coordinate_checks import checking
from tests.monitors.module_monitoring import hooks_on
from torch import nn

from torchtap import ModuleMonitor, RefinedCoordinateCheck


def test_without_a_metric_of_outputs_a_monitored_model_carries_no_hook_for_them() -> None:
    model = mlp()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.begin_step(0)
    assert hooks_on(model) == 0
    monitor.end_step()


@pytest.mark.parametrize("sort", ["activation", "activation_difference"])
def test_a_metric_that_is_added_in_a_monitored_step_is_heard_in_it(sort: str) -> None:
    monitor, reference, _ = checking(mlp())
    x = torch.randn(5, 7)
    for step in range(2):
        monitor.begin_step(step)
        if step == 0:
            getattr(monitor, f"add_{sort}_metric")("norm", lambda *values: values[0].norm())
        with monitor.no_monitor():
            reference(x)
        y = monitor.module(x)
        monitor.end_step()
        assert monitor.get_step_metrics()[f"{sort}/[root module]/norm"] == pytest.approx(
            y.norm().item(), rel=1e-5
        )


def test_the_reference_s_values_are_copies_of_what_it_returned() -> None:
    monitor, reference, check = checking(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)))
    x = torch.randn(4, 6)
    expected = reference[0](x).detach().clone()
    monitor.begin_step(0)
    with torch.no_grad():
        reference(x)
    given = x.clone()
    x.zero_()
    assert torch.equal(monitor.reference_module_activations["0"], expected)
    assert torch.equal(check.reference_module_inputs["0"][0], given)


def test_a_monitor_hears_its_reference_when_the_checks_hooks_are_gone() -> None:
    monitor, reference, check = checking(mlp())
    monitor.add_activation_difference_metric("norm", lambda x, y: (x - y).norm())
    x = torch.randn(5, 7)
    for step in range(2):
        monitor.begin_step(step)
        with monitor.no_monitor():
            reference(x)
        monitor.module(x)
        monitor.end_step()
        check.rcc_reference_forward_hooks.remove_all_hooks()
        assert "activation_difference/0/norm" in monitor.get_step_metrics()


def test_a_monitor_hears_a_reference_that_replaces_the_checks_in_mid_step() -> None:
    monitor, reference, _ = checking(mlp())
    other = copy.deepcopy(reference)
    x = torch.randn(5, 7)
    monitor.begin_step(0)
    monitor.set_reference_module(other)
    reference(x)
    assert not monitor.reference_module_activations
    other(x)
    assert monitor.reference_module_activations
    monitor.end_step()


def test_two_checks_of_one_monitor_give_the_same_numbers() -> None:
    monitor, reference, first = checking(mlp())
    second = RefinedCoordinateCheck(monitor)
    x, found = torch.randn(5, 7), []
    for check in (first, second):
        for step in range(2):
            monitor.begin_step((check is second) * 2 + step)
            reference(x)
            monitor.module(x)
            check.refined_coordinate_check()
            monitor.end_step()
        found.append(monitor.get_step_metrics())
    assert found[0] == pytest.approx(found[1], rel=1e-6)
