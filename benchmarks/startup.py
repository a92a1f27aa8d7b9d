"""What starting costs: the import, beside ``import torch`` in fresh interpreters, and a watch on 10,000 modules."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from torch import nn

import torchtap as tt
from benchmarks.timing import fastest, quartiles

__all__ = ["run"]

_PROBE = """
import time
begin = time.process_time()
import torch
torch_only = time.process_time()
import torchtap
torchtap.watch, torchtap.capture, torchtap.tap, torchtap.Stats
print(torch_only - begin, time.process_time() - torch_only)
"""


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of seconds with their bars."""
    torch_times, ours = [], []
    for _ in range(5 if quick else 15):
        printed = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True
        ).stdout.split()
        torch_times.append(float(printed[0]))
        ours.append(float(printed[1]))
    low, middle, high = quartiles(ours)
    rows = [
        {
            "case": "import torchtap, watch, capture, tap and Stats, after import torch",
            "seconds": f"{middle:.3f} [{low:.3f}–{high:.3f}]",
            "beside": f"import torch: {statistics.median(torch_times):.2f} s",
            "bar": "≤ 0.1 s",
            "holds": middle <= 0.1,
        }
    ]
    model = nn.Sequential(*(nn.Sequential(*(nn.Identity() for _ in range(99))) for _ in range(100)))
    modules = sum(1 for _ in model.modules())

    def watch_and_close() -> None:
        tt.watch(model, None, "*:output").close()

    seconds = fastest(watch_and_close, rounds=5, clock=time.process_time)
    rows.append(
        {
            "case": f"tt.watch on {modules:,} modules, outputs of all, first step armed; and close",
            "seconds": f"{seconds:.3f}",
            "beside": "",
            "bar": "≤ 1 s",
            "holds": seconds <= 1,
        }
    )
    return rows
