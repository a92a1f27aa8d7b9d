"""The share of a watched step's own CPU time that is spent inside torchtap: a number that a busy machine cannot blur.

The models and cases of `benchmarks.steps`, one torch thread. Every entry into torchtap is timed where it happens: its
hooks, its gradient callbacks, the beginning and the end of the step. What the clock takes is taken off again. What
torch takes to call a hook at all is not in it (1.4 µs each). On two threads it is the wall's time, which a busy machine
blurs a little; what the thread that writes a run does meanwhile is not in it.
``as a ratio`` is what the step would cost with it over without it. "Audit and census" is the part of it in which a run
checks itself and looks for changes of the model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchtap as tt
from benchmarks.inside import AUDIT_AND_CENSUS, Entries, timed_inside
from benchmarks.models import Training, gpt2_training, gpt_training, mlp_training
from benchmarks.steps import EVERYTHING, NEVER, OUTPUTS
from benchmarks.timing import one_thread, quartiles

__all__ = ["run", "share"]


Asked = tuple[str, tuple[tt.Tap, ...], float]

_GPT: list[Asked] = [
    ("all outputs", OUTPUTS, 1.03),
    ("with gradients and parameters", EVERYTHING, 1.05),
    ("armed, off schedule", NEVER, 1.005),
]
_AUDIT: list[Asked] = [
    ("audit and census, all outputs", OUTPUTS, 1.003),
    ("audit and census, with gradients and parameters", EVERYTHING, 1.003),
    ("audit and census, off schedule", NEVER, 1.0003),
]
_MLP: list[Asked] = [
    ("all outputs", OUTPUTS, 1.08),
    ("with gradients and parameters", EVERYTHING, 1.12),
    ("armed, off schedule", NEVER, 1.005),
]
_TINY: list[Asked] = [
    ("with gradients and parameters", EVERYTHING, 1.12),
    ("armed, off schedule", NEVER, 1.01),
]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """One row for each model and case."""
    few = 3 if quick else 5
    with one_thread():
        rows = [
            *_rows("GPT 12 × 384", gpt_training(), _GPT, few),
            *_rows("GPT 12 × 384", gpt_training(), _AUDIT, few, entries=AUDIT_AND_CENSUS),
            *_rows("MLP 50 × 256", mlp_training(), _MLP, 40),
            *_rows("GPT 4 × 192", gpt_training(4, 192, 64), _TINY, 40),
            *_rows("GPT 4 × 32", gpt_training(4, 32, 64), _TINY, 40),
        ]
        torch.set_num_threads(2)
        into_a_run = "with gradients and parameters, into a run"
        with tempfile.TemporaryDirectory() as folder:
            return [
                *rows,
                *_rows("GPT 12 × 384, two threads", gpt_training(), _GPT[:2], few, time.perf_counter),
                *_rows(
                    "GPT-2 12 × 768, two threads",
                    gpt2_training(),
                    [(into_a_run, EVERYTHING, 1.06)],
                    few,
                    time.perf_counter,
                    folder,
                ),
            ]


def _rows(
    model: str,
    training: Training,
    asked: list[Asked],
    steps: int,
    clock: Callable[[], float] = time.thread_time,
    folder: str | None = None,
    entries: Entries | None = None,
) -> list[dict[str, Any]]:
    rows = []
    for case, taps, bar in asked:
        measured = share(training, taps, steps, clock=clock, folder=folder, entries=entries)
        seconds, (low, middle, high) = measured
        rows.append(
            {
                "model": model,
                "case": case,
                "inside torchtap": f"{seconds * 1e3:.3g} ms a step",
                "as a ratio": f"{middle:.4f} [{low:.4f}–{high:.4f}]",
                "bar": f"≤ {bar}",
                "holds": high <= bar,
            }
        )
    return rows


def share(
    training: Training,
    taps: tuple[tt.Tap, ...],
    steps: int,
    call: Callable[[Tensor], Tensor] | None = None,
    *,
    clock: Callable[[], float] = time.thread_time,
    folder: str | None = None,
    entries: Entries | None = None,
) -> tuple[float, tuple[float, float, float]]:
    """Seconds of a step inside torchtap or some entries, and the quartiles of the ratio that they make."""
    ratios, inside = [], []
    model = training.model if call is None else call
    with timed_inside(clock, entries) as spent, tt.watch(model, folder, list(taps)) as watch:
        for step in range(steps + 1):
            spent.clear()
            begin = clock()
            with watch.step():
                training.step(call)
            whole = clock() - begin
            if step:  # the first one meets every site for the first time
                ratios.append(1 + spent.seconds / (whole - spent.seconds - spent.timing))
                inside.append(spent.seconds)
    return quartiles(inside)[1], quartiles(ratios)
