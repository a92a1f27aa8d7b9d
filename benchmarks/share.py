"""The share of a watched step's own CPU time that is spent inside torchtap: a number that a busy machine cannot blur.

The models and cases of `benchmarks.steps`, one torch thread. Every entry into torchtap is timed where it happens: its
hooks, its gradient callbacks, the beginning and the end of the step. What the clock takes is taken off again. What
torch takes to call a hook at all is not in it (1.4 µs each).
``as a ratio`` is what the step would cost with it over without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

import torchtap as tt
from benchmarks.inside import timed_inside
from benchmarks.models import Training, gpt_training, mlp_training
from benchmarks.steps import EVERYTHING, NEVER, OUTPUTS
from benchmarks.timing import one_thread, quartiles

__all__ = ["run", "share"]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """One row for each model and case."""
    with one_thread():
        models = {
            "GPT 12 × 384": gpt_training(),
            "GPT 4 × 192": gpt_training(4, 192, 64),
            "GPT 4 × 32": gpt_training(4, 32, 64),
            "MLP 50 × 256": mlp_training(),
        }
        cases: list[tuple[str, str, tuple[tt.Tap, ...], float | None]] = [
            ("GPT 12 × 384", "all outputs", OUTPUTS, 1.03),
            ("GPT 12 × 384", "with gradients and parameters", EVERYTHING, 1.05),
            ("GPT 12 × 384", "armed, off schedule", NEVER, 1.005),
            ("MLP 50 × 256", "all outputs", OUTPUTS, 1.08),
            ("MLP 50 × 256", "with gradients and parameters", EVERYTHING, 1.12),
            ("MLP 50 × 256", "armed, off schedule", NEVER, 1.005),
            ("GPT 4 × 192", "with gradients and parameters", EVERYTHING, 1.12),
            ("GPT 4 × 192", "armed, off schedule", NEVER, 1.01),
            ("GPT 4 × 32", "with gradients and parameters", EVERYTHING, 1.12),
            ("GPT 4 × 32", "armed, off schedule", NEVER, 1.01),
        ]
        rows = []
        for model, case, taps, bar in cases:
            steps = 40 if model != "GPT 12 × 384" else 3 if quick else 5
            seconds, (low, middle, high) = share(models[model], taps, steps)
            rows.append(
                {
                    "model": model,
                    "case": case,
                    "inside torchtap": f"{seconds * 1e3:.3g} ms a step",
                    "as a ratio": f"{middle:.4f} [{low:.4f}–{high:.4f}]",
                    "bar": "" if bar is None else f"≤ {bar}",
                    "holds": "" if bar is None else high <= bar,
                }
            )
        return rows


def share(
    training: Training,
    taps: tuple[tt.Tap, ...],
    steps: int,
    call: Callable[[Tensor], Tensor] | None = None,
) -> tuple[float, tuple[float, float, float]]:
    """Seconds of a step inside torchtap, and the quartiles of the ratio that they make."""
    ratios, inside = [], []
    model = training.model if call is None else call
    with timed_inside() as spent, tt.watch(model, None, list(taps)) as watch:
        for step in range(steps + 1):
            spent.clear()
            begin = time.thread_time()
            with watch.step():
                training.step(call)
            whole = time.thread_time() - begin
            if step:  # the first one meets every site for the first time
                ratios.append(1 + spent.seconds / (whole - spent.seconds - spent.timing))
                inside.append(spent.seconds)
    return quartiles(inside)[1], quartiles(ratios)
