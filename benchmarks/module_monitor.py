"""A training step with a monitor beside one without: torch-module-monitor, hooks by hand, and torchtap.

Activation mean, std, norm and largest magnitude on all modules, parameter norm, gradient norm; every step and one
step of ten; and the refined coordinate check. ``overhead`` is ratio − 1. Run it with
``python -m benchmarks.module_monitor``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch_module_monitor
from torch import Tensor, nn

from benchmarks.models import Training, gpt_training, mlp_training
from benchmarks.timing import Case, Ratio, case, compare, one_thread
from torchtap.monitors import torch_module_monitor as torchtap_monitor

__all__ = ["run"]

Build = Callable[[], Training]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of the tables."""
    with one_thread():
        return [
            *_rows("MLP 50 × 256", mlp_training, rounds=9 if quick else 41, block=10),
            *_rows("GPT 12 × 384", gpt_training, rounds=2 if quick else 6, block=1 if quick else 10),
        ]


def _rows(model: str, build: Build, rounds: int, block: int) -> list[dict[str, Any]]:
    every = compare(
        {
            "plain": _plain(build),
            "plain again": _plain(build),
            "hooks by hand": _by_hand(build),
            "torch-module-monitor": _monitored(build, torch_module_monitor, 1),
            "torchtap": _monitored(build, torchtap_monitor, 1),
        },
        base="plain",
        rounds=rounds,
    )
    rows = _as_rows(model, "every step", every)
    unmonitored = compare(
        {
            "plain": _plain(build),
            "torch-module-monitor": _monitored(build, torch_module_monitor, 10**9),
            "torchtap": _monitored(build, torchtap_monitor, 10**9),
        },
        base="plain",
        rounds=rounds,
        repeats=2,
    )
    rows += _as_rows(model, "unmonitored steps", unmonitored)
    some = compare(
        {
            "plain": _plain(build),
            "torch-module-monitor": _monitored(build, torch_module_monitor, 10),
            "torchtap": _monitored(build, torchtap_monitor, 10),
        },
        base="plain",
        rounds=max(2, rounds // block),
        repeats=10,
        warm_up=0,
    )
    rows += _as_rows(model, "1 step of 10", some)
    check = compare(
        {
            "plain": _plain(build),
            "torch-module-monitor": _checked(build, torch_module_monitor),
            "torchtap": _checked(build, torchtap_monitor),
        },
        base="plain",
        rounds=rounds,
    )
    return rows + _as_rows(model, "refined coordinate check", check)


def _as_rows(model: str, what: str, measured: dict[str, Ratio]) -> list[dict[str, Any]]:
    theirs = measured["torch-module-monitor"].ratio - 1
    return [
        {
            "model": model,
            "what": what,
            "who": who,
            "ms": round(ratio.seconds * 1e3, 1),
            "with / without": str(ratio),
            "overhead": f"{ratio.ratio - 1:+.1%}",
            "share of the peer's": f"{(ratio.ratio - 1) / theirs:.2f}" if theirs > 0 else "–",
        }
        for who, ratio in measured.items()
    ]


def _plain(build: Build) -> Case:
    return case(build().step)


def _monitored(build: Build, package: ModuleType, every: int) -> Case:
    training = build()
    monitor = package.ModuleMonitor(monitor_step_fn=lambda step: step % every == 0)
    monitor.set_module(training.model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_activation_metric("std", lambda x: x.std())
    monitor.add_activation_metric("norm", lambda x: x.norm())
    monitor.add_activation_metric("absmax", lambda x: x.abs().max())
    monitor.add_parameter_metric("norm", lambda x: x.norm())
    monitor.add_gradient_metric("norm", lambda x: x.norm())
    # Step 0 is behind when the first round begins, so that "1 of 10**9" has no monitored step in it.
    counter = [0 if every <= 10 else 1]

    def step() -> None:
        monitor.begin_step(counter[0])
        counter[0] += 1
        training.loss(training.model(training.inputs)).backward()
        monitor.monitor_parameters()
        monitor.monitor_gradients()
        training.optimizer.step()
        training.optimizer.zero_grad()
        monitor.end_step()
        monitor.storage.clear()

    return case(step)


def _checked(build: Build, package: ModuleType) -> Case:
    training = build()
    reference = copy.deepcopy(training.model)
    monitor = package.ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(training.model)
    monitor.set_reference_module(reference)
    check = package.RefinedCoordinateCheck(monitor)
    counter = [0]

    def step() -> None:
        monitor.begin_step(counter[0])
        counter[0] += 1
        with torch.no_grad():
            reference(training.inputs)
        loss = training.loss(training.model(training.inputs))
        check.refined_coordinate_check()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        monitor.end_step()
        monitor.storage.clear()

    return case(step)


def _by_hand(build: Build) -> Case:
    """The same numbers from hooks as one would write them: four ops each, one read at the end of the step."""
    training = build()
    taken: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        value = output.detach()
        taken.extend((value.mean(), value.std(), value.norm(), value.abs().max()))

    for module in training.model.modules():
        if not isinstance(module, nn.ModuleList):
            module.register_forward_hook(hook)

    def step() -> None:
        training.loss(training.model(training.inputs)).backward()
        with torch.no_grad():
            taken.extend(parameter.norm() for parameter in training.model.parameters())
            taken.extend(p.grad.norm() for p in training.model.parameters() if p.grad is not None)
        training.optimizer.step()
        training.optimizer.zero_grad()
        torch.stack(taken).tolist()
        taken.clear()

    return case(step)


if __name__ == "__main__":
    import sys

    rows = run(quick="--quick" in sys.argv)
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
