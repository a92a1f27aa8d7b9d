"""What starting costs: imports and first watches, beside ``import torch``, and a watch on 10,000 modules.

Each start is a fresh interpreter. Bytecode is kept, as pip keeps it when it installs a package: one start that is not
counted makes it. Without it Python compiles each source file anew at each start, which takes several times as long as
running it; one row has that, for checkouts with ``PYTHONDONTWRITEBYTECODE``.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import nn

import torchtap as tt
from benchmarks.timing import fastest, quartiles

__all__ = ["run"]

_NAMES = """
import time
begin = time.process_time()
import torch
torch_only = time.process_time()
import torchtap
imported = time.process_time()
torchtap.watch, torchtap.capture, torchtap.tap, torchtap.Stats
print(torch_only - begin, imported - torch_only, time.process_time() - torch_only)
"""
# The model has made a step of its own before, so that what torch does the first time is not counted.
_FIRST_WATCH = """
import sys, time, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
batch = torch.zeros(2, 8)
model(batch).sum().backward()
begin = time.process_time()
import torchtap
with torchtap.watch(model, sys.argv[1] if sys.argv[1:] else None, "*:output") as watch, watch.step():
    model(batch).sum().backward()
print(time.process_time() - begin)
"""
_SOURCE = Path(tt.__file__).parents[1]


def _start(program: str, *arguments: str, bytecode: bool = True, source: Path = _SOURCE) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, *([] if bytecode else ["-B"]), "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [float(number) for number in done.stdout.split()]


def _several(count: int, program: str, **options: Any) -> list[list[float]]:
    """What each of some starts took, number by number; one more goes before them."""
    _start(program, **options)
    return [list(column) for column in zip(*(_start(program, **options) for _ in range(count)), strict=True)]


def _row(case: str, seconds: list[float], beside: str = "", bar: float | None = None) -> dict[str, Any]:
    low, middle, high = quartiles(seconds)
    return {
        "case": case,
        "seconds": f"{middle:.3f} [{low:.3f}–{high:.3f}]",
        "beside": beside,
        "bar": "" if bar is None else f"≤ {bar} s",
        "holds": "" if bar is None else middle <= bar,
    }


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of seconds with their bars."""
    starts = 5 if quick else 15
    torch_only, imported, used = _several(starts, _NAMES)
    (watched,) = _several(starts, _FIRST_WATCH)
    with tempfile.TemporaryDirectory() as folder:
        written = [_start(_FIRST_WATCH, f"{folder}/{number}")[0] for number in range(starts + 1)][1:]
        fresh = Path(folder) / "source"
        shutil.copytree(
            _SOURCE / "torchtap", fresh / "torchtap", ignore=shutil.ignore_patterns("__pycache__")
        )
        _, _, compiled = _several(starts, _NAMES, bytecode=False, source=fresh)
    return [
        _row(
            "import torchtap, after import torch",
            imported,
            f"import torch: {statistics.median(torch_only):.2f} s",
            0.1,
        ),
        _row("the same, and its watch, capture, tap and Stats, which load what they need", used, bar=0.054),
        _row("the same where no bytecode is kept", compiled),
        _row("the first watch of outputs and one step, with all that they load", watched),
        _row("the same into a run folder", written),
        _many_modules(),
    ]


def _many_modules() -> dict[str, Any]:
    model = nn.Sequential(*(nn.Sequential(*(nn.Identity() for _ in range(99))) for _ in range(100)))
    modules = sum(1 for _ in model.modules())

    def watch_and_close() -> None:
        tt.watch(model, None, "*:output").close()

    seconds = fastest(watch_and_close, rounds=5, clock=time.process_time)
    return {
        "case": f"tt.watch on {modules:,} modules, outputs of all, first step armed; and close",
        "seconds": f"{seconds:.3f}",
        "beside": "",
        "bar": "≤ 1 s",
        "holds": seconds <= 1,
    }
