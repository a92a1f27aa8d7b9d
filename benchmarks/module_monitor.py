"""A training step with a monitor beside one without: torch-module-monitor, hooks by hand, and torchtap.

Activation mean, std, norm and largest magnitude on all modules, parameter norm, gradient norm; every step and one
step of ten; and the refined coordinate check, with the reference's forward, which the user has to make in any case.
``overhead`` is ratio − 1, and the last column ours over the peer's. One torch thread, CPU time; all cases share one
model, which has no hook on it between cases.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch_module_monitor
from torch import Tensor, nn

from benchmarks.models import Training, gpt_training, mlp_training
from benchmarks.timing import Case, Ratio, case, compare, one_thread, table
from torchtap.monitors import torch_module_monitor as torchtap_monitor

__all__ = ["run"]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of the table."""
    with one_thread():
        return [
            *_rows("MLP 50 × 256", mlp_training(), rounds=11 if quick else 41, repeats=3),
            *_rows("GPT 12 × 384", gpt_training(), rounds=2 if quick else 5, repeats=1),
        ]


def _rows(model: str, training: Training, rounds: int, repeats: int) -> list[dict[str, Any]]:
    plain = case(training.step)
    every = compare(
        {
            "plain": plain,
            "plain again": plain,
            "hooks by hand": _by_hand(training),
            "torch-module-monitor": _monitored(training, torch_module_monitor, 1),
            "torchtap": _monitored(training, torchtap_monitor, 1),
        },
        base="plain",
        rounds=rounds,
        repeats=repeats,
    )
    never = compare(
        {
            "plain": plain,
            "torch-module-monitor": _monitored(training, torch_module_monitor, 10**9),
            "torchtap": _monitored(training, torchtap_monitor, 10**9),
        },
        base="plain",
        rounds=rounds,
        repeats=repeats,
    )
    some = compare(
        {
            "plain": plain,
            "torch-module-monitor": _monitored(training, torch_module_monitor, 10),
            "torchtap": _monitored(training, torchtap_monitor, 10),
        },
        base="plain",
        rounds=max(2, rounds // 4),
        repeats=10,
        warm_up=10,  # what is found out at the first monitored step is kept
    )
    check = compare(
        {
            "plain": plain,
            "torch-module-monitor": _checked(training, torch_module_monitor),
            "torchtap": _checked(training, torchtap_monitor),
        },
        base="plain",
        rounds=rounds,
        repeats=repeats,
    )
    return [
        *_as_rows(model, "every step", every),
        *_as_rows(model, "unmonitored steps", never),
        *_as_rows(model, "1 step of 10", some),
        *_as_rows(model, "refined coordinate check", check),
    ]


def _as_rows(model: str, what: str, measured: dict[str, Ratio]) -> list[dict[str, Any]]:
    theirs = measured["torch-module-monitor"].ratio - 1
    return [
        {
            "model": model,
            "what": what,
            "with": who,
            "ms": ratio.seconds * 1e3,
            "with / without": str(ratio),
            "overhead": f"{ratio.ratio - 1:+.1%}",
            "share of the peer's": f"{(ratio.ratio - 1) / theirs:.2f}" if theirs > 0 else "–",
        }
        for who, ratio in measured.items()
    ]


def _monitored(training: Training, package: ModuleType, every: int) -> Case:
    @contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        monitor = package.ModuleMonitor(monitor_step_fn=lambda step: step % every == 0)
        monitor.set_module(training.model)
        monitor.add_activation_metric("mean", lambda x: x.mean())
        monitor.add_activation_metric("std", lambda x: x.std())
        monitor.add_activation_metric("norm", lambda x: x.norm())
        monitor.add_activation_metric("absmax", lambda x: x.abs().max())
        monitor.add_parameter_metric("norm", lambda x: x.norm())
        monitor.add_gradient_metric("norm", lambda x: x.norm())
        steps = itertools.count(0 if every <= 10 else 1)  # step 0 is always monitored

        def work() -> None:
            monitor.begin_step(next(steps))
            training.loss(training.model(training.inputs)).backward()
            monitor.monitor_parameters()
            monitor.monitor_gradients()
            training.optimizer.step()
            training.optimizer.zero_grad()
            monitor.end_step()

        yield work
        monitor.activation_hooks.remove_all_hooks()

    return entered


def _checked(training: Training, package: ModuleType) -> Case:
    @contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        reference = copy.deepcopy(training.model)
        monitor = package.ModuleMonitor(monitor_step_fn=lambda step: True)
        monitor.set_module(training.model)
        monitor.set_reference_module(reference)
        check = package.RefinedCoordinateCheck(monitor)
        steps = itertools.count()

        def work() -> None:
            monitor.begin_step(next(steps))
            with torch.no_grad():
                reference(training.inputs)
            loss = training.loss(training.model(training.inputs))
            check.refined_coordinate_check()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            monitor.end_step()

        yield work
        check.rcc_forward_hooks.remove_all_hooks()
        monitor.remove_reference_module()
        monitor.activation_hooks.remove_all_hooks()

    return entered


def _by_hand(training: Training) -> Case:
    """The same numbers from hooks as one would write them: four ops each, one read at the end of the step."""

    @contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        taken: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            value = output.detach()
            taken.extend((value.mean(), value.std(), value.norm(), value.abs().max()))

        handles = [module.register_forward_hook(hook) for module in training.model.modules()]

        def work() -> None:
            training.loss(training.model(training.inputs)).backward()
            with torch.no_grad():
                taken.extend(parameter.norm() for parameter in training.model.parameters())
                taken.extend(p.grad.norm() for p in training.model.parameters() if p.grad is not None)
            training.optimizer.step()
            training.optimizer.zero_grad()
            torch.stack(taken).tolist()
            taken.clear()

        yield work
        for handle in handles:
            handle.remove()

    return entered


if __name__ == "__main__":
    print(table(run()))
