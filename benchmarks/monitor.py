"""What ``epoch_full`` needs when an epoch's outputs are far larger than its memory ceiling.

    python -m benchmarks.monitor                 # 4 GiB of outputs under a ceiling of 512 MiB
    python -m benchmarks.monitor 256 32          # the same in MiB, for a quick look

Runs in a process of its own and reports the growth of its peak resident memory, the time beside that of the same
passes without a monitor, and how far the statistics are from a reference that goes over all outputs twice.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtap import Monitor

__all__ = ["measure", "run"]

MIB = 2**20
_WIDTH = 1024


def run(outputs_mib: int = 4096, ceiling_mib: int = 512) -> dict[str, float]:
    """Measure in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.monitor", str(outputs_mib), str(ceiling_mib), "--here"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(outputs_mib: int, ceiling_mib: int, folder: Path) -> dict[str, float]:
    """One epoch whose outputs are ``outputs_mib`` in all, under a ceiling of ``ceiling_mib``."""
    batch_mib = max(1, min(32, ceiling_mib // 8))
    batches, rows = outputs_mib // batch_mib, batch_mib * MIB // 4 // _WIDTH
    model = nn.Sequential(nn.Identity())
    model(_batch(0, rows))
    bare = _timed(lambda: [model(_batch(number, rows)) for number in range(batches)])
    monitor = Monitor(
        model,
        {"0": {"alias": "x", "record_type": "epoch_full"}},
        [1],
        folder,
        memory_ceiling=ceiling_mib * MIB,
    )

    def epoch() -> None:
        monitor.set_epoch(1)
        for number in range(batches):
            monitor.set_batch_idx(number)
            model(_batch(number, rows))

    with _PeakMemory() as memory:
        recorded = _timed(epoch)
        saving = _timed(monitor.save_epoch_outputs)
        statistics = monitor.get_epoch_statistics()["x"][1]
        monitor.clear_current_epoch_data()
        monitor.remove_hooks()
    files = sum(1 for _ in folder.rglob("batch_*.pt"))
    return {
        "outputs MiB": batches * batch_mib,
        "ceiling MiB": ceiling_mib,
        "peak growth MiB": memory.growth / MIB,
        "bare s": bare,
        "recorded s": recorded,
        "saving s": saving,
        "files": files,
        "worst relative error": _worst_error(statistics, batches, rows),
    }


def _batch(number: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, _WIDTH, generator=generator) * (1 + number % 7) + number % 3


def _worst_error(statistics: dict[str, Any], batches: int, rows: int) -> float:
    """Against two passes over all outputs, in float64: first the mean, then the distances from it."""
    count = batches * rows * _WIDTH
    columns = torch.zeros(_WIDTH, dtype=torch.float64)
    low, high = math.inf, -math.inf
    for number in range(batches):
        batch = _batch(number, rows)
        columns += batch.double().sum(0)
        low, high = min(low, batch.min().item()), max(high, batch.max().item())
    mean, column_mean = columns.sum().item() / count, columns / (batches * rows)
    squares, column_squares = 0.0, torch.zeros(_WIDTH, dtype=torch.float64)
    for number in range(batches):
        batch = _batch(number, rows).double()
        squares += (batch - mean).square().sum().item()
        column_squares += (batch - column_mean).square().sum(0)
    expected = {
        "count": count,
        "mean": mean,
        "std": math.sqrt(squares / (count - 1)),
        "min": low,
        "max": high,
    }
    errors = [abs(statistics[name] - value) / abs(value) for name, value in expected.items()]
    each = statistics["over_first_dimension"]
    column_std = (column_squares / (batches * rows - 1)).sqrt()
    errors.append(((each["mean"] - column_mean).abs().max() / column_mean.abs().max()).item())
    errors.append(((each["std"] - column_std).abs() / column_std).max().item())
    return max(errors)


def _timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class _PeakMemory:
    """How far resident memory rose above where it stood, looked at every few milliseconds."""

    def __enter__(self) -> _PeakMemory:
        # Memory that was freed but not given back would hide growth.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        self._start = self._peak = _resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._peak - self._start

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self._peak = max(self._peak, _resident())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> None:
    sizes = [int(argument) for argument in arguments if argument.isdigit()]
    if "--here" not in arguments:
        for name, value in run(*sizes).items():
            print(f"{name:>22}: {value:,.3g}" if value < 1 else f"{name:>22}: {value:,.1f}")
        return
    folder = Path(tempfile.mkdtemp(prefix="torchtap-monitor-"))
    try:
        print(json.dumps(measure(sizes[0], sizes[1], folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
