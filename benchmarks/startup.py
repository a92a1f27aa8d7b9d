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
imported = time.process_time()
torchtap.watch, torchtap.capture, torchtap.tap, torchtap.Stats
print(torch_only - begin, imported - torch_only, time.process_time() - torch_only)
"""


def _probe() -> list[float]:
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of seconds with their bars."""
    printed = [_probe() for _ in range(5 if quick else 15)]
    torch_only, imported, used = (list(column) for column in zip(*printed, strict=True))
    beside = f"import torch: {statistics.median(torch_only):.2f} s"
    rows = []
    for case, seconds in {
        "import torchtap, after import torch": imported,
        "the same, and its watch, capture, tap and Stats, which load what they need": used,
    }.items():
        low, middle, high = quartiles(seconds)
        rows.append(
            {
                "case": case,
                "seconds": f"{middle:.3f} [{low:.3f}–{high:.3f}]",
                "beside": beside,
                "bar": "≤ 0.1 s" if seconds is imported else "",
                "holds": middle <= 0.1 if seconds is imported else "",
            }
        )
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
