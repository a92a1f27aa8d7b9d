"""A watched training step beside the same step without torchtap, and what peers cost on the same model.

GPT-like, 12 blocks of width 384, 8 × 128 tokens, AdamW: arithmetic dominates. GPT-2, 12 × 768 of Hugging Face, 2 × 256
tokens, vocabulary of 8,192, AdamW: 1.3 GB are read in a step. MLP, 50 layers of width 256, batch 32,
AdamW: nothing but overhead. All twelve statistics are taken at every site, every step; peers take what they offer.
"By hand: sum()" reads each value once and does nothing else, so it is about what one reading of them costs.
All cases of a table share one model, which has no hook on it between cases. One torch thread and CPU time, unless
"two threads" is said: then it is the wall's time, since CPU time would count the threads one after the other.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt
from benchmarks.models import GPT, Training, gpt2_training, gpt_training, hooked, mlp_training
from benchmarks.timing import Case, Ratio, case, compare, one_thread

__all__ = ["EVERYTHING", "NEVER", "OUTPUTS", "judged", "run", "watched"]

OUTPUTS = (tt.tap("*:output"),)
EVERYTHING = tuple(tt.tap(f"*:{kind}") for kind in ("output", "grad_output", "param", "param_grad"))
NEVER = (tt.tap("*:output", every=10**9, offset=10**9 - 1),)


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of both models."""
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            *_gpt(rounds=3 if quick else 9),
            *_gpt_on_two_threads(rounds=3 if quick else 7),
            *_gpt_beside_a_busy_core(rounds=3 if quick else 7),
            *_gpt2_on_two_threads(rounds=3 if quick else 7),
            *_mlp(rounds=7 if quick else 21),
            *_served(rounds=7 if quick else 41),
        ]


def _gpt(rounds: int) -> list[dict[str, Any]]:
    training = gpt_training()
    measured = compare(
        {
            "plain": case(training.step),
            "plain again": case(training.step),
            "all outputs": watched(training, OUTPUTS),
            "outputs, their gradients, parameters, their gradients": watched(training, EVERYTHING),
            "armed, off schedule": watched(training, NEVER),
        },
        base="plain",
        rounds=rounds,
        warm_up=0,
    )
    bars = {
        "all outputs": 1.03,
        "outputs, their gradients, parameters, their gradients": 1.05,
        "armed, off schedule": 1.005,
    }
    return judged("GPT 12 × 384", measured, bars)


def _gpt_on_two_threads(
    rounds: int, name: str = "GPT 12 × 384, two threads", at_most: tuple[float, float] = (1.03, 1.05)
) -> list[dict[str, Any]]:
    torch.set_num_threads(2)
    training = gpt_training()
    measured = compare(
        {
            "plain": case(training.step),
            "all outputs": watched(training, OUTPUTS),
            "outputs, their gradients, parameters, their gradients": watched(training, EVERYTHING),
        },
        base="plain",
        rounds=rounds,
        warm_up=0,
        clock=time.perf_counter,
    )
    torch.set_num_threads(1)
    cases = ("all outputs", "outputs, their gradients, parameters, their gradients")
    return judged(name, measured, dict(zip(cases, at_most, strict=True)))


def _gpt_beside_a_busy_core(rounds: int) -> list[dict[str, Any]]:
    """Two torch threads while another process keeps one core busy, as data loading does."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            return _gpt_on_two_threads(rounds, "GPT 12 × 384, two threads, one core busy", (1.03, 1.06))
        finally:
            other.kill()


def _gpt2_on_two_threads(rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(2)
    training = gpt2_training()
    everything = "outputs, their gradients, parameters, their gradients, into a run"
    with tempfile.TemporaryDirectory() as folder:
        measured = compare(
            {"plain": case(training.step), everything: watched(training, EVERYTHING, folder=folder)},
            base="plain",
            rounds=rounds,
            clock=time.perf_counter,
        )
    torch.set_num_threads(1)
    return judged("GPT-2 12 × 768, two threads", measured, {everything: 1.06})


def _mlp(rounds: int) -> list[dict[str, Any]]:
    training = mlp_training()
    with tempfile.TemporaryDirectory() as folder:
        measured = compare(
            {
                "plain": case(training.step),
                "plain again": case(training.step),
                "all outputs": watched(training, OUTPUTS),
                "all outputs, into a run": watched(training, OUTPUTS, folder=folder),
                "outputs, their gradients, parameters, their gradients": watched(training, EVERYTHING),
                "armed, off schedule": watched(training, NEVER),
                "by hand: sum() of each output, gradient, parameter, parameter's gradient": _sums_of_training(
                    training
                ),
                "peer: hook by hand, mean std norm absmax, one read a step": _by_hand(training),
                "peer: torch-module-monitor, the same four": _module_monitor(training),
                "peer: TensorBoard histogram in a hook": _tensorboard(training, folder),
                "peer: wandb.watch (gradients only)": _wandb(training, folder),
            },
            base="plain",
            rounds=rounds,
            repeats=3,
        )
    peers = [ratio.ratio for name, ratio in measured.items() if name.startswith("peer")]
    bars = {
        "all outputs": 1.08,
        "all outputs, into a run": 1.08,
        "outputs, their gradients, parameters, their gradients": 1.12,
        "armed, off schedule": 1.005,
    }
    rows = judged("MLP 50 × 256", measured, bars)
    rows.append(
        {
            "model": "MLP 50 × 256",
            "case": "all outputs, against the cheapest peer",
            "with / without": f"{measured['all outputs'].ratio:.3f} against {min(peers):.3f}",
            "ms": "",
            "bar": "below",
            "holds": measured["all outputs"].ratio < min(peers),
        }
    )
    return rows


def _served(rounds: int) -> list[dict[str, Any]]:
    """A small model that answers requests, each a step: two layers of width 64, one sequence of 16 tokens."""
    model, tokens = GPT(2, 64, 1).eval(), torch.randint(0, 1024, (1, 16))

    def request() -> None:
        with torch.inference_mode():
            model(tokens)

    def watched_requests(*taps: tt.Tap) -> Case:
        @contextlib.contextmanager
        def entered() -> Iterator[Callable[[], None]]:
            with tt.watch(model, None, list(taps)) as watch:

                def step() -> None:
                    with watch.step():
                        request()

                yield step

        return entered

    measured = compare(
        {
            "plain": case(request),
            "plain again": case(request),
            "statistics at every request": watched_requests(tt.tap("*:output")),
            "statistics at every 100th": watched_requests(tt.tap("*:output", every=100)),
            "by hand: sum() of each output": _sums_of_outputs(model, request),
        },
        base="plain",
        rounds=rounds,
        repeats=200,
        warm_up=2,
    )
    bars = {"statistics at every request": 1.3, "statistics at every 100th": 1.02}
    return judged("served GPT 2 × 64", measured, bars)


def judged(model: str, measured: dict[str, Ratio], bars: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each case, with its bar and whether it holds."""
    return [
        {
            "model": model,
            "case": name,
            "with / without": str(ratio),
            "ms": f"{ratio.seconds * 1e3:,.2f}",
            "bar": f"≤ {bars[name]}" if name in bars else "",
            "holds": ratio.verdict(bars[name]) if name in bars else "",
        }
        for name, ratio in measured.items()
    ]


def watched(
    training: Training,
    taps: tuple[tt.Tap, ...],
    call: Callable[[Tensor], Tensor] | None = None,
    folder: str | None = None,
) -> Case:
    """Training steps under watch. Making the watch is not part of the step, nor is meeting each site the first time."""

    @contextlib.contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        run = None if folder is None else tempfile.mkdtemp(dir=folder)
        with tt.watch(training.model if call is None else call, run, list(taps)) as watch:
            if call is None:  # a compiled model would be compiled again for the smaller batch
                with watch.step():
                    training.glance()

            def step() -> None:
                with watch.step():
                    training.step(call)

            yield step

    return entered


# -- one reading of each value ------------------------------------------------------------------------------


def _sums_of_outputs(model: nn.Module, request: Callable[[], None]) -> Case:
    @contextlib.contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        taken: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            taken.append(output.sum())

        def step() -> None:
            request()
            torch.stack(taken).tolist()
            taken.clear()

        with hooked((model.modules(), hook)):
            yield step

    return entered


def _sums_of_training(training: Training) -> Case:
    @contextlib.contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        taken: list[Tensor] = []

        def take(value: Tensor) -> None:
            taken.append(value.detach().sum())

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            take(output)
            output.register_hook(take)

        def take_state(*_: object) -> None:
            for parameter in training.model.parameters():
                take(parameter)
                if parameter.grad is not None:
                    take(parameter.grad)

        def step() -> None:
            training.step()
            torch.stack(taken).tolist()
            taken.clear()

        before_update = training.optimizer.register_step_pre_hook(take_state)
        try:
            with hooked((training.model.modules(), hook)):
                yield step
        finally:
            before_update.remove()

    return entered


# -- peers --------------------------------------------------------------------------------------------------


def _by_hand(training: Training) -> Case:
    @contextlib.contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        taken: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            value = output.detach()
            taken.extend((value.mean(), value.std(), value.norm(), value.abs().max()))

        def step() -> None:
            training.step()
            torch.stack(taken).tolist()
            taken.clear()

        with hooked((training.model.modules(), hook)):
            yield step

    return entered


def _module_monitor(training: Training) -> Case:
    from torch_module_monitor import ModuleMonitor

    @contextlib.contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
        monitor.set_module(training.model)
        for name, metric in {
            "mean": lambda x: x.mean(),
            "std": lambda x: x.std(),
            "norm": lambda x: x.norm(),
            "absmax": lambda x: x.abs().max(),
        }.items():
            monitor.add_activation_metric(name, metric)
        number = 0

        def step() -> None:
            nonlocal number
            monitor.begin_step(number)
            training.step()
            monitor.end_step()
            monitor.storage.clear()
            number += 1

        try:
            yield step
        finally:
            for module in training.model.modules():  # it has no way to take its hooks off
                module._forward_hooks.clear()
                module._forward_pre_hooks.clear()

    return entered


def _tensorboard(training: Training, folder: str) -> Case:
    @contextlib.contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        from torch.utils.tensorboard import SummaryWriter

        names = {id(module): name for name, module in training.model.named_modules()}
        with SummaryWriter(tempfile.mkdtemp(dir=folder)) as writer:

            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                writer.add_histogram(names[id(module)] or "model", output)

            with hooked((training.model.modules(), hook)):
                yield training.step

    return entered


def _wandb(training: Training, folder: str) -> Case:
    import wandb

    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    run = wandb.init(project="torchtap", dir=folder)

    @contextlib.contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        run.watch(training.model, log="gradients", log_freq=1)

        def step() -> None:
            training.step()
            run.log({"loss": 0.0})

        try:
            yield step
        finally:
            run.unwatch(training.model)

    return entered
