"""The share of a watched step's own CPU time that is spent inside torchtap: a number that a busy machine cannot blur.

The models and cases of `benchmarks.steps`, one torch thread. Every entry into torchtap is timed where it happens: its
hooks, its gradient callbacks, the end of the step. What torch takes to call a hook at all is not in it (1.4 µs each).
``as a ratio`` is what the step would cost with it over without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torchtap as tt
from benchmarks.models import Training, gpt_training, mlp_training
from benchmarks.steps import EVERYTHING, OUTPUTS
from benchmarks.timing import one_thread, quartiles
from torchtap.taps.eager import EagerAttachment
from torchtap.taps.receiver import Receiver
from torchtap.taps.state import StateReader
from torchtap.watching import Watch

__all__ = ["run"]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """One row for each model and case."""
    with one_thread():
        gpt, mlp = gpt_training(), mlp_training()
        steps = 3 if quick else 5
        return [
            _row("GPT 12 × 384", "all outputs", gpt, OUTPUTS, steps, 1.03),
            _row("GPT 12 × 384", "with gradients and parameters", gpt, EVERYTHING, steps, 1.08),
            _row("MLP 50 × 256", "all outputs", mlp, OUTPUTS, 40, 1.08),
            _row("MLP 50 × 256", "with gradients and parameters", mlp, EVERYTHING, 40, None),
        ]


def _row(
    model: str, case: str, training: Training, taps: tuple[tt.Tap, ...], steps: int, bar: float | None
) -> dict[str, Any]:
    ratios, inside = [], []
    with _timed() as spent, tt.watch(training.model, None, list(taps)) as watch:
        for step in range(steps + 1):
            spent[0] = 0.0
            begin = time.thread_time()
            with watch.step():
                training.step()
            whole = time.thread_time() - begin
            if step:  # the first one meets every site for the first time
                ratios.append(whole / (whole - spent[0]))
                inside.append(spent[0])
    low, middle, high = quartiles(ratios)
    return {
        "model": model,
        "case": case,
        "inside torchtap": f"{quartiles(inside)[1] * 1e3:.2f} ms a step",
        "as a ratio": f"{middle:.3f} [{low:.3f}–{high:.3f}]",
        "bar": "" if bar is None else f"≤ {bar}",
        "holds": "" if bar is None else high <= bar,
    }


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Seconds inside torchtap since they were last set to zero."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.thread_time() - begin

        return measured

    def timed_hooks(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: timed(make(*args))

    with (
        patch.object(EagerAttachment, "_output_hook", timed_hooks(EagerAttachment._output_hook)),
        patch.object(EagerAttachment, "_grad_output_hook", timed_hooks(EagerAttachment._grad_output_hook)),
        patch.object(StateReader, "_on_optimizer_step", timed(StateReader._on_optimizer_step)),
        patch.object(Receiver, "_take_gradient", timed(Receiver._take_gradient)),
        patch.object(Watch, "_end", timed(Watch._end)),
    ):
        yield spent
