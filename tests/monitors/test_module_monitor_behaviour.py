"""What a program may look at besides the numbers: attributes, return values, errors. Both packages, side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.optional import need
from torch import nn

from torchtap.monitors import torch_module_monitor as ours

peer = need("torch_module_monitor")

Probe = Callable[[ModuleType], Any]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def monitor_of(package: ModuleType, model: nn.Module | None = None, **options: Any) -> Any:
    monitor = package.ModuleMonitor(monitor_step_fn=lambda step: step % 2 == 0, **options)
    if model is not None:
        monitor.set_module(model)
        monitor.add_activation_metric("mean", lambda x: x.mean())
    return monitor


def referenced(package: ModuleType) -> tuple[Any, nn.Module, nn.Module]:
    model, reference = network(), network()
    monitor = monitor_of(package, model)
    monitor.set_reference_module(reference)
    return monitor, model, reference


def a_new_monitor(package: ModuleType) -> Any:
    monitor = monitor_of(package)
    return (
        monitor.module,
        monitor.reference_module,
        monitor.current_step,
        monitor.is_monitoring(),
        monitor.storage.log_dict,
        len(monitor.activation_hooks),
        monitor.logger.name,
        monitor.cpu_offload,
    )


def a_set_module(package: ModuleType) -> Any:
    model = network()
    monitor = monitor_of(package, model, excluded_modules_regex="1")
    return sorted(monitor.module_names.values()), len(monitor.activation_hooks)


def listed_metrics(package: ModuleType) -> Any:
    pattern, function, aggregation = monitor_of(package, network()).activation_metrics["mean"]
    return pattern.pattern, function(torch.ones(3)).item(), aggregation


def the_state_through_two_steps(package: ModuleType) -> Any:
    model = network()
    monitor = monitor_of(package, model)
    found: list[Any] = []

    def note() -> None:
        state = (monitor.current_step, monitor.current_step_monitored, monitor.within_monitoring_window)
        found.append((*state, monitor.storage.has_step(1), sorted(monitor.get_step_metrics())))

    for step in range(2):
        found.append(monitor.begin_step(step))
        note()
        with monitor.no_monitor():
            model(torch.ones(1, 4))
            note()
        model(torch.ones(1, 4))
        monitor.end_step()
        note()
    return found, len(monitor.activation_hooks)


def values_in_the_middle_of_a_step(package: ModuleType) -> Any:
    model = network()
    monitor = monitor_of(package, model)
    monitor.begin_step(0)
    for _ in range(2):
        model(torch.ones(3, 4))
    # The peer has a tensor for each call, torchtap one for all calls so far.
    return {key: torch.cat(list(values)).shape for key, values in monitor.get_step_metrics().items()}


def what_a_step_logs(package: ModuleType) -> Any:
    logger = Mock()
    model = network()
    monitor = monitor_of(package, model, logger=logger)
    monitor.begin_step(0)
    model(torch.ones(3, 4))
    monitor.monitor_activations("own", torch.ones(2, 2))
    monitor.monitor_activations("own", torch.ones(2, 2), is_reference=True)
    monitor.log_scalar("a", 1)
    monitor.log_scalar("a", torch.tensor(3.0))
    monitor.end_step()
    types = {key: type(value).__name__ for key, value in monitor.get_step_metrics().items()}
    return types, logger.info.call_args[0][0].split(".")[0], logger.warning.call_count


def forced_scalars(package: ModuleType) -> Any:
    monitor = monitor_of(package, network())
    monitor.begin_step(1)
    monitor.log_scalar("unseen", 1)
    monitor.log_scalar("seen", 2, force=True)
    monitor.end_step()
    return monitor.get_step_metrics()


def a_reference(package: ModuleType) -> Any:
    monitor, _, reference = referenced(package)
    before = monitor.has_reference_module(), len(monitor.reference_activation_hooks)
    names = sorted(monitor.reference_module_names.values())
    monitor.begin_step(0)
    reference(torch.ones(1, 4))
    stored = {name: value.requires_grad for name, value in monitor.reference_module_activations.items()}
    monitor.after_micro_batch()
    emptied = monitor.reference_module_activations
    monitor.remove_reference_module()
    after = monitor.has_reference_module(), monitor.reference_module, monitor.reference_module_names
    return before, names, sorted(stored.items()), emptied, after, len(reference[0]._forward_hooks)


def storage(package: ModuleType) -> Any:
    kept = package.StorageManager()
    kept.log_tensor(0, "k", torch.ones(2, 3))
    shapes = [tuple(each.shape) for each in kept.log_dict[0]["k"]]
    kept.log_tensor(0, "k", torch.zeros(6))
    kept.log_scalar(0, "s", 1)
    kept.log_scalar(0, "s", 2)
    kept.log_tensor(0, "d", torch.ones(2), aggregation_fn=lambda v: {"_a": 1, "_b": 2})
    kept.aggregate_step(0)
    kept.aggregate_step(77)
    found = dict(kept.get_step_metrics(0)), kept.condensed_log_dict(), list(kept.aggregation_fns), shapes
    kept.clear()
    kept.load_metrics({1: {"a": 2}})
    return found, kept.get_all_metrics(), kept.get_step_metrics(5)


def hooks(package: ModuleType) -> Any:
    calls: list[int] = []
    layer = nn.Linear(2, 2)
    manager = package.HooksManager()
    manager.register_forward_hook(layer, lambda *_: calls.append(1))
    manager.register_forward_hook(layer, lambda *_: calls.append(2))
    layer(torch.ones(2))
    found = [list(calls), len(manager), layer in manager.hooks]
    manager.remove_hook(layer)
    manager.remove_hook(layer)
    found += [len(manager), len(layer._forward_hooks)]
    with package.HooksManager() as entered:
        entered.register_forward_hook(layer, lambda *_: None)
    return [*found, len(layer._forward_hooks)]


def a_mixin(package: ModuleType) -> Any:
    class Layer(nn.Module, package.MonitorMixin):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            package.MonitorMixin.__init__(self)

    layer, reference = Layer(), Layer()
    found = [layer.module_monitor, layer.is_reference_module, layer.is_monitoring, layer.get_module_monitor()]
    monitor = monitor_of(package, layer)
    monitor.set_reference_module(reference)
    found += [layer.module_monitor is monitor, reference.is_reference_module, layer.is_monitoring]
    monitor.begin_step(0)
    found.append(layer.is_monitoring)
    with monitor.no_monitor():
        found.append(layer.is_monitoring)
    monitor.remove_reference_module()
    return [*found, reference.module_monitor, reference.is_reference_module]


def a_coordinate_check(package: ModuleType) -> Any:
    monitor, model, reference = referenced(package)
    check = package.RefinedCoordinateCheck(monitor)
    found: list[Any] = [
        len(check.rcc_forward_hooks),
        len(check.rcc_reference_forward_hooks),
        dict(check.module_inputs),
    ]
    monitor.begin_step(0)
    reference(torch.ones(1, 4))
    model(torch.ones(1, 4))
    found += [
        sorted(check.module_inputs),
        sorted(check.module_outputs),
        sorted(check.reference_module_inputs),
    ]
    found.append(type(check.module_inputs["0"]))
    check.refined_coordinate_check()
    return [*found, check.module_inputs, sorted(monitor.get_step_metrics())]


def formatted_names(package: ModuleType) -> Any:
    names = ("", "_orig_mod", "_orig_mod.a.b", "_fsdp_wrapped_module.x", "a._forward_module.b", "x")
    return [package.monitor.default_format_module_name_fn(name) for name in names]


@pytest.mark.parametrize(
    "probe",
    [
        a_new_monitor,
        a_set_module,
        listed_metrics,
        the_state_through_two_steps,
        values_in_the_middle_of_a_step,
        what_a_step_logs,
        forced_scalars,
        a_reference,
        storage,
        hooks,
        a_mixin,
        a_coordinate_check,
        formatted_names,
    ],
    ids=lambda probe: probe.__name__,
)
def test_both_packages_look_the_same(probe: Probe) -> None:
    assert probe(ours) == probe(peer)


def add_twice(package: ModuleType) -> None:
    monitor_of(package, network()).add_activation_metric("mean", lambda x: x.mean())


def set_none(package: ModuleType) -> None:
    monitor_of(package).set_module(None)


def set_twice(package: ModuleType) -> None:
    monitor_of(package, network()).set_module(network())


def begin_without_a_module(package: ModuleType) -> None:
    monitor_of(package).begin_step(0)


def go_back(package: ModuleType) -> None:
    monitor = monitor_of(package, network())
    monitor.begin_step(3)
    monitor.begin_step(2)


def name_a_stranger(package: ModuleType) -> None:
    monitor = monitor_of(package, network())
    monitor.begin_step(0)
    monitor.monitor_activations(nn.Linear(1, 1), torch.ones(2))


def log_text(package: ModuleType) -> None:
    monitor_of(package, network()).log_scalar("c", "x", force=True)


def log_a_vector(package: ModuleType) -> None:
    monitor_of(package, network()).log_scalar("c", torch.ones(3), force=True)


def load_into_a_full_storage(package: ModuleType) -> None:
    kept = package.StorageManager()
    kept.log_scalar(0, "a", 1)
    kept.load_metrics({})


def take_another_structure(package: ModuleType) -> None:
    monitor_of(package, network()).set_reference_module(nn.Linear(2, 2))


def run_the_reference_twice(package: ModuleType) -> None:
    monitor, _, reference = referenced(package)
    monitor.begin_step(0)
    reference(torch.ones(1, 4))
    reference(torch.ones(1, 4))


def divide_by_zero(package: ModuleType) -> None:
    model = network()
    monitor = monitor_of(package, model)
    monitor.add_activation_metric("broken", lambda x: 1 / 0)
    monitor.begin_step(0)
    model(torch.ones(1, 4))


def mask_a_causal_attention(package: ModuleType) -> None:
    monitor = monitor_of(package, network())
    monitor.begin_step(0)
    q = torch.randn(1, 2, 3, 4)
    package.monitor_scaled_dot_product_attention(
        monitor, "a", q, q, q, attn_mask=torch.zeros(3, 3), is_causal=True
    )


def check_without_a_module(package: ModuleType) -> None:
    package.RefinedCoordinateCheck(package.ModuleMonitor())


def check_without_a_pass(package: ModuleType) -> None:
    monitor, _, _ = referenced(package)
    check = package.RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    check.refined_coordinate_check()


@pytest.mark.parametrize(
    "mistake",
    [
        add_twice,
        set_none,
        set_twice,
        begin_without_a_module,
        go_back,
        name_a_stranger,
        log_text,
        log_a_vector,
        load_into_a_full_storage,
        take_another_structure,
        run_the_reference_twice,
        divide_by_zero,
        mask_a_causal_attention,
        check_without_a_module,
        check_without_a_pass,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_is_caught_by_what_catches_the_peers_error(mistake: Callable[[ModuleType], None]) -> None:
    with pytest.raises(Exception) as theirs:
        mistake(peer)
    with pytest.raises(theirs.type) as mine:
        mistake(ours)
    assert str(mine.value)


def test_a_copy_made_after_the_module_was_set_is_a_reference_as_good_as_any() -> None:
    model = network()
    monitor = monitor_of(ours, model)
    monitor.set_reference_module(copy.deepcopy(model))
    assert monitor.has_reference_module()
