"""A watched training step of a ``torch.compile``d model beside the compiled step without torchtap.

The model is that of `benchmarks.steps`. Compiling is not part of a step: both compilations, the user's and the one
with taps in it, are made before the clock starts, and their times are given.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import torchtap as tt
from benchmarks.models import gpt_training
from benchmarks.steps import NEVER, OUTPUTS, judged, watched
from benchmarks.timing import case, compare, one_thread

__all__ = ["run"]


def run(quick: bool = False, layers: int = 12) -> list[dict[str, Any]]:
    """Rows as in `benchmarks.steps`."""
    with one_thread():
        training = gpt_training(layers=layers)
        model: Any = torch.compile(training.model)
        begin = time.process_time()
        training.step(model)
        plain = time.process_time() - begin
        with tt.watch(model, None, list(OUTPUTS)) as watch, watch.step():
            begin = time.process_time()
            training.step(model)
            tapped = time.process_time() - begin
        measured = compare(
            {
                "plain": case(lambda: training.step(model)),
                "plain again": case(lambda: training.step(model)),
                "all outputs": watched(training, OUTPUTS, model),
                "armed, off schedule": watched(training, NEVER, model),
            },
            base="plain",
            rounds=3 if quick else 9,
        )
    name = f"compiled GPT {layers} × 384"
    rows = judged(name, measured, {"all outputs": 1.02, "armed, off schedule": 1.005})
    compiling = f"{tapped / plain:.2f} (first step {plain:.0f} s without, {tapped:.0f} s with)"
    rows.append(
        {
            "model": name,
            "case": "compiling, all outputs",
            "with / without": compiling,
            "ms": "",
            "bar": "",
            "holds": "",
        }
    )
    return rows
