"""A watched training step of a ``torch.compile``d model beside the compiled step without torchtap.

The model is that of `benchmarks.steps`. Compiling is not part of a step: both compilations, the user's and the one
with taps in it, are made before the clock starts. What they take is in the rows of first steps, each of which is the
only one in its process, once with empty caches and once with those that the process before it left. The last rows are
why the statistics of a compiled model come from the native kernel on the CPU, called by one op in the graph, and are
not left to Inductor: GELU of (8, 128, 1536), and what it costs to have its statistics as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import first_step
from benchmarks.models import gpt_training
from benchmarks.share import share
from benchmarks.steps import NEVER, OUTPUTS, judged, watched
from benchmarks.timing import case, compare, one_thread
from torchtap.reduce import StatsBlock
from torchtap.reduce.moments import measure_masked

__all__ = ["run"]


def run(quick: bool = False, layers: int = 12) -> list[dict[str, Any]]:
    """Rows as in `benchmarks.steps`."""
    with one_thread():
        training = gpt_training(layers=layers)
        model: Any = torch.compile(training.model)
        training.step(model)
        with watched(training, OUTPUTS, model)() as step:
            step()
        measured = compare(
            {
                "plain": case(lambda: training.step(model)),
                "plain again": case(lambda: training.step(model)),
                "all outputs": watched(training, OUTPUTS, model),
                "armed, off schedule": watched(training, NEVER, model),
            },
            base="plain",
            rounds=3 if quick else 9,
            warm_up=0,
        )
        inside = share(training, OUTPUTS, 3 if quick else 5, model)[1]
    name = f"compiled GPT {layers} × 384"
    rows = judged(name, measured, {"all outputs": 1.02, "armed, off schedule": 1.005})
    rows.append(
        {
            "model": name,
            "case": "all outputs, by the share of the step spent inside torchtap",
            "with / without": f"{inside[1]:.3f} [{inside[0]:.3f}–{inside[2]:.3f}]",
            "ms": "",
            "bar": "≤ 1.02",
            "holds": inside[2] <= 1.02,
        }
    )
    first = first_step.run(["GPT 4 × 384"] if quick else ["GPT 12 × 384", "GPT-2 4 × 768"])
    return [*rows, *first, *_fused(rounds=20 if quick else 60)]


def _fused(rounds: int) -> list[dict[str, Any]]:
    x = torch.randn(8, 128, 1536)
    block = StatsBlock(1)
    plain: Any = torch.compile(lambda x: F.gelu(x))
    fused: Any = torch.compile(_with_statistics)
    with one_thread(), torch.no_grad():
        measured = compare(
            {
                "GELU": case(lambda: plain(x)),
                "GELU, then the native kernel": case(lambda: block.measure_into(0, 0, plain(x))),
                "GELU and its statistics, fused by Inductor": case(lambda: fused(x)),
            },
            base="GELU",
            rounds=rounds,
            repeats=3,
        )
    return judged("one op", measured, {})


def _with_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """As compiled graphs have them on other devices."""
    y = F.gelu(x)
    return y, measure_masked(y.reshape(-1).double())
