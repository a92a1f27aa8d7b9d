"""The first step of a compiled training, in which it is compiled: with taps and without, each in a new process.

``python -m benchmarks.first_step MODEL "all outputs"`` (or ``plain``) runs one such step with the caches that it finds.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchtap as tt
from benchmarks.models import Training, gpt2_training, gpt_training
from benchmarks.steps import EVERYTHING, OUTPUTS
from benchmarks.timing import one_thread

__all__ = ["run"]

MODELS: dict[str, Callable[[], Training]] = {
    "GPT 4 × 384": lambda: gpt_training(layers=4),
    "GPT 12 × 384": gpt_training,
    "GPT-2 4 × 768": lambda: gpt2_training(layers=4),
    "GPT-2 12 × 768": gpt2_training,
}
TAPS = {"plain": (), "all outputs": OUTPUTS, "with gradients and parameters": EVERYTHING}
_COLD, _WARM = "empty caches", "in a second process, from the first one's caches"


def run(models: list[str]) -> list[dict[str, Any]]:
    """Two rows for each model and what is asked of it: compiled for the first time, and from Inductor's caches."""
    rows = []
    for model in models:
        plain = _twice(model, "plain")
        for what in TAPS:
            if what != "plain":
                rows += _rows(model, what, plain)
    return rows


def _rows(model: str, what: str, plain: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    tapped = _twice(model, what)
    rows = []
    for case, bar in ((_COLD, 1.3), (_WARM, None)):
        without, with_taps = plain[case], tapped[case]
        ratio, of_cpu_time = (with_taps[clock] / without[clock] for clock in ("wall", "cpu"))
        again = ", compiled again" if case == _WARM and with_taps["compiled"] else ""
        seconds = f"{without['wall']:.1f} s without, {with_taps['wall']:.1f} s with{again}"
        rows.append(
            {
                "model": f"compiled {model}",
                "case": f"first step, {what}, {case}",
                "with / without": f"{ratio:.2f} ({seconds}; CPU time {of_cpu_time:.2f})",
                "ms": with_taps["wall"] * 1e3,
                "bar": "" if bar is None else f"≤ {bar}",
                "holds": "" if bar is None else ratio <= bar,
            }
        )
    return rows


def _twice(model: str, what: str) -> dict[str, dict[str, float]]:
    """The same step in two processes, one after the other: the first finds empty caches, the second what it left."""
    with tempfile.TemporaryDirectory() as caches:
        return {case: _in_a_new_process(model, what, caches) for case in (_COLD, _WARM)}


def _in_a_new_process(model: str, what: str, caches: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_step", model, what],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(model: str, what: str) -> dict[str, float]:
    from torch._dynamo.utils import counters

    with one_thread():
        training = MODELS[model]()
        training.step()  # what the first step of any training costs, compiled or not
        compiled: Any = torch.compile(training.model)
        wall, cpu = time.perf_counter(), _cpu_time()
        if not TAPS[what]:
            training.step(compiled)
        else:
            with tt.watch(compiled, None, list(TAPS[what])) as watch, watch.step():
                training.step(compiled)
        return {
            "wall": time.perf_counter() - wall,
            "cpu": _cpu_time() - cpu,
            "compiled": counters["inductor"]["fxgraph_cache_miss"],
        }


def _cpu_time() -> float:
    """That of this process and of those it ran, such as C++ compilers."""
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:])))
