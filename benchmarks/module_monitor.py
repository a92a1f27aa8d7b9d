"""A training step with a monitor beside one without: torch-module-monitor, hooks by hand, and torchtap.

Activation mean, std, norm and largest magnitude on all modules, parameter norm, gradient norm; every step and one
step of ten; and the refined coordinate check, with the reference's forward, which the user has to make in any case.
torchtap's metrics are named statistics; a row of its own has the same functions as the peer.
``overhead`` is ratio − 1, once from paired steps and once, as ``inside``, from the time that a step spends in the
monitor's hooks and calls and in the reference's forward (what these do to the rest of the step is not in it). ``share``
is ours over the peer's, by both. A bar is decided by the pairs, or where their noise is too large for that, by the time
inside.
One torch thread, CPU time; all cases share one model, which has no hook on it between cases.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, final
from unittest.mock import patch

import torch
import torch_module_monitor
from torch import Tensor, nn

from benchmarks.models import Training, gpt_training, hooked, mlp_training
from benchmarks.timing import Case, Ratio, case, compare, one_thread, quartiles, table
from torchtap.monitors import torch_module_monitor as torchtap_monitor

__all__ = ["run"]

_FEW = 5  # rounds below which the spread says nothing
PEER, OURS = "torch-module-monitor", "torchtap"
PACKAGES = {PEER: torch_module_monitor, OURS: torchtap_monitor}
Timed = Callable[[Callable[..., Any]], Callable[..., Any]]


@final
@dataclass(frozen=True)
class _Effort:
    """How often things are measured: rounds of each comparison, and steps in a round.

    In a large step, timing the hooks costs nothing: the pairs themselves are then looked into. In a small one the time
    inside is taken from ``inside`` steps of its own.
    """

    every: int
    never: int
    some: int
    check: int
    repeats: int
    inside: int


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of the table."""
    mlp = _Effort(every=25, never=11, some=3, check=15, repeats=3, inside=8)
    gpt = _Effort(every=2, never=1, some=0, check=2, repeats=1, inside=0)
    if quick:
        mlp = _Effort(every=3, never=5, some=2, check=3, repeats=3, inside=2)
        gpt = _Effort(every=1, never=1, some=0, check=1, repeats=1, inside=0)
    with one_thread():
        return [
            *_rows("MLP 50 × 256", mlp_training(), mlp),
            *_rows("GPT 12 × 384", gpt_training(), gpt),
        ]


def _rows(model: str, training: Training, effort: _Effort) -> list[dict[str, Any]]:
    plain = case(training.step)
    repeats = effort.repeats

    def rows(
        what: str,
        make: Callable[[ModuleType, Timed], Case],
        rounds: int,
        bar: float | None = None,
        others: dict[str, Case] | None = None,
        warm_up: int = 1,
    ) -> list[dict[str, Any]]:
        inside: dict[str, list[float]] = {name: [] for name in PACKAGES}
        recording = {name: _recording(make, package, inside[name]) for name, package in PACKAGES.items()}
        alone = {name: make(package, _untimed) for name, package in PACKAGES.items()}
        for _ in range(effort.inside):
            for each in recording.values():
                with each() as work:
                    for _ in range(warm_up + 1):
                        work()
        cases = {"plain": plain, **(others or {}), **(alone if effort.inside else recording)}
        measured = compare(cases, base="plain", rounds=rounds, repeats=repeats, warm_up=warm_up)
        return _as_rows((model, what), measured, inside, bar)

    def monitored(every: int) -> Callable[[ModuleType, Timed], Case]:
        return lambda package, timed: _monitored(
            training, package, every, timed, named=package is PACKAGES[OURS]
        )

    by_hand: dict[str, Case] = {}
    if effort.inside:
        functions = _monitored(training, PACKAGES[OURS], 1, _untimed, named=False)
        by_hand = {"plain again": plain, "hooks by hand": _by_hand(training), f"{OURS}, functions": functions}
    found = rows("every step", monitored(1), effort.every, 0.4, by_hand)
    found += rows("unmonitored steps", monitored(10**9), effort.never)
    if effort.some:
        # What is found out at the first monitored step is kept, so the first ten steps are not counted.
        cases = {
            name: _monitored(training, package, 10, _untimed, named=name == OURS)
            for name, package in PACKAGES.items()
        }
        some = compare({"plain": plain, **cases}, base="plain", rounds=effort.some, repeats=10, warm_up=10)
        found += _as_rows((model, "1 step of 10"), some, {}, None)
    eighth = compare(
        {
            "plain": plain,
            "by hand: reference, linears again, one sum() in each hook": _summed(training, share=1 / 8),
            OURS: _checked(training, PACKAGES[OURS], _untimed, share=1 / 8),
        },
        base="plain",
        rounds=effort.check,
        repeats=repeats,
        warm_up=3,
    )
    found += _as_rows((model, "refined coordinate check, 1/8 of the batch"), eighth, {}, None)
    return found + rows(
        "refined coordinate check",
        lambda package, timed: _checked(training, package, timed),
        effort.check,
        warm_up=3,
    )


# -- what the numbers say ----------------------------------------------------------------------------------


def _as_rows(
    where: tuple[str, str], measured: dict[str, Ratio], inside: dict[str, list[float]], bar: float | None
) -> list[dict[str, Any]]:
    """One row for each way; the bar is in ours: on its share of the peer's overhead, or on its own without a peer."""
    rows = []
    for who, ratio in measured.items():
        mine = inside.get(who)
        row = {
            "model": where[0],
            "what": where[1],
            "with": who,
            "ms": ratio.seconds * 1e3,
            "with / without": str(ratio),
            "overhead": f"{ratio.ratio - 1:+.1%}",
            "inside": f"{quartiles(mine)[1] / measured['plain'].seconds:+.2%}" if mine else "",
            "share of the peer's": "",
            "bar": "",
            "holds": "",
        }
        if who == OURS and where[1] == "unmonitored steps":
            row["bar"] = "≤ 1 %"
            row["holds"] = _idle_verdict(ratio, max(inside[OURS]) / measured["plain"].seconds)
        elif who == OURS and PEER not in measured:
            if bar is not None:
                row["bar"], row["holds"] = f"≤ {bar}", ratio.verdict(bar)
        elif who == OURS:
            share, error = ratio.share_of(measured[PEER])
            shares = [a / b for a, b in zip(inside[OURS], inside[PEER], strict=True)] if inside else []
            row["share of the peer's"] = " / ".join(
                [f"{share:.2f}", *([f"{quartiles(shares)[1]:.2f} inside"] if shares else [])]
            )
            if bar is not None:
                error = error if ratio.rounds >= _FEW else math.inf
                row["bar"], row["holds"] = f"≤ {bar} of the peer's", _share_verdict(share, error, shares, bar)
        rows.append(row)
    return rows


def _share_verdict(share: float, error: float, shares: list[float], bar: float) -> str:
    if share + error <= bar:
        return "yes"
    if share - error > bar:
        return "no"
    low, _, high = quartiles(shares)
    if low <= bar < high:
        return "undecided"
    return "yes, inside" if high <= bar else "no, inside"


def _idle_verdict(ratio: Ratio, inside: float) -> str:
    verdict = ratio.verdict(1.01) if ratio.rounds >= _FEW else "undecided"
    if not verdict.startswith("undecided"):
        return verdict
    return "yes, inside" if inside <= 0.01 else verdict


# -- the time inside ---------------------------------------------------------------------------------------


@final
class _Clock:
    """Adds up the CPU time inside functions, whichever of them call each other."""

    def __init__(self) -> None:
        self.inside = 0.0
        self._depth = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth += 1
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside += time.thread_time() - begin
                self._depth -= 1

        return measured

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Forward hooks that are put on meanwhile count."""
        register = nn.Module.register_forward_hook

        def registered(module: nn.Module, hook: Any, **options: Any) -> Any:
            return register(module, self.timed(hook), **options)

        with patch.object(nn.Module, "register_forward_hook", registered):
            yield


def _recording(make: Callable[[ModuleType, Timed], Case], package: ModuleType, found: list[float]) -> Case:
    """The same case, which adds the seconds that its last step spent inside to ``found``."""

    @contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        clock = _Clock()
        with clock.hooks(), make(package, clock.timed)() as work:

            def measured() -> None:
                clock.inside = 0.0
                work()

            yield measured
        found.append(clock.inside)

    return entered


def _untimed(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


# -- the ways ----------------------------------------------------------------------------------------------


_FUNCTIONS: dict[str, Any] = {
    "mean": lambda x: x.mean(),
    "std": lambda x: x.std(),
    "norm": lambda x: x.norm(),
    "absmax": lambda x: x.abs().max(),
}
_STATISTICS = {"mean": "mean", "std": "std", "norm": "l2", "absmax": "absmax"}


def _monitored(training: Training, package: ModuleType, every: int, timed: Timed, *, named: bool) -> Case:
    metrics = _STATISTICS if named else _FUNCTIONS

    @contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        monitor = package.ModuleMonitor(monitor_step_fn=lambda step: step % every == 0)
        monitor.set_module(training.model)
        for name, metric in metrics.items():
            monitor.add_activation_metric(name, metric)
        monitor.add_parameter_metric("norm", metrics["norm"])
        monitor.add_gradient_metric("norm", metrics["norm"])
        steps = itertools.count(0 if every <= 10 else 1)  # step 0 is always monitored
        begin, end = timed(monitor.begin_step), timed(monitor.end_step)
        parameters, gradients = timed(monitor.monitor_parameters), timed(monitor.monitor_gradients)

        def work() -> None:
            begin(next(steps))
            training.loss(training.model(training.inputs)).backward()
            parameters()
            gradients()
            training.optimizer.step()
            training.optimizer.zero_grad()
            end()

        yield work
        monitor.activation_hooks.remove_all_hooks()

    return entered


def _checked(training: Training, package: ModuleType, timed: Timed, share: float = 1.0) -> Case:
    """``share`` is the part of the batch that is checked; the peer has none."""
    rows = slice(None) if share == 1 else slice(0, max(1, int(len(training.inputs) * share)))
    options = {} if share == 1 else {"share": share}

    @contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        reference = copy.deepcopy(training.model)
        monitor = package.ModuleMonitor(monitor_step_fn=lambda step: True)
        monitor.set_module(training.model)
        monitor.set_reference_module(reference)
        check = package.RefinedCoordinateCheck(monitor, **options)
        steps = itertools.count()
        begin, end = timed(monitor.begin_step), timed(monitor.end_step)
        refer, compare_both = timed(reference), timed(check.refined_coordinate_check)

        def work() -> None:
            begin(next(steps))
            with torch.no_grad():
                refer(training.inputs[rows])
            loss = training.loss(training.model(training.inputs))
            compare_both()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            end()

        yield work
        check.rcc_forward_hooks.remove_all_hooks()
        monitor.remove_reference_module()
        monitor.activation_hooks.remove_all_hooks()

    return entered


def _summed(training: Training, share: float) -> Case:
    """What a check on a part of the batch cannot do without, and one number for each output: the limit of a check."""
    rows = max(1, int(len(training.inputs) * share))

    @contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        reference = copy.deepcopy(training.model)
        taken: list[Tensor] = []

        def summed(module: nn.Module, args: Any, output: Tensor) -> None:
            taken.append(output.detach()[:rows].sum())

        def run_again(linear: nn.Linear) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                with torch.no_grad():
                    linear.forward(args[0][:rows])

            return hook

        pairs = zip(training.model.modules(), reference.modules(), strict=True)
        again = [([module], run_again(other)) for module, other in pairs if isinstance(other, nn.Linear)]
        every = [*training.model.modules(), *reference.modules()]

        def work() -> None:
            with torch.no_grad():
                reference(training.inputs[:rows])
            training.step()
            torch.stack(taken).tolist()
            taken.clear()

        with hooked((every, summed), *again):
            yield work

    return entered


def _by_hand(training: Training) -> Case:
    """The same numbers from hooks as one would write them: four ops each, one read at the end of the step."""

    @contextmanager
    def entered() -> Iterator[Callable[[], None]]:
        taken: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            value = output.detach()
            taken.extend((value.mean(), value.std(), value.norm(), value.abs().max()))

        def work() -> None:
            training.loss(training.model(training.inputs)).backward()
            with torch.no_grad():
                taken.extend(parameter.norm() for parameter in training.model.parameters())
                taken.extend(p.grad.norm() for p in training.model.parameters() if p.grad is not None)
            training.optimizer.step()
            training.optimizer.zero_grad()
            torch.stack(taken).tolist()
            taken.clear()

        with hooked((training.model.modules(), hook)):
            yield work

    return entered


if __name__ == "__main__":
    print(table(run(quick="--quick" in sys.argv)))
