"""How cost grows: with the number of sites, the size of a tensor, the number of steps. Each should be a straight line.

Sites: statistics of a chain of 10 to 10,000 small modules, one forward pass; added time a site. Sizes: one output of
1 KiB to 1 GiB (as far as memory allows); added time a byte. Steps: a small model watched for 100 to 100,000 steps
into a run; time a step, memory, files and bytes of the run.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt
from benchmarks.timing import case, compare, one_thread

__all__ = ["run", "run_sites", "run_sizes", "run_steps"]

_MIB = 1 << 20


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of all three."""
    with one_thread():
        return [*run_sites(quick), *run_sizes(quick), *run_steps(quick)]


class _Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0


def run_sites(quick: bool = False) -> list[dict[str, Any]]:
    """Added microseconds for each site."""
    rows = []
    x = torch.ones(4, 8)
    for sites in (10, 100, 1000) if quick else (10, 100, 1000, 10_000):
        model = nn.Sequential(*(_Twice() for _ in range(sites)))
        bare, watched = _added(model, x, rounds=max(5, 2000 // sites))
        rows.append(_row("sites", f"{sites:,}", watched - bare, (watched - bare) / sites * 1e6, "µs a site"))
    return rows


def run_sizes(quick: bool = False) -> list[dict[str, Any]]:
    """Added nanoseconds for each KiB of one output."""
    rows = []
    for exponent in (10, 14, 18, 22, 26) if quick else (10, 14, 18, 22, 26, 30):
        size = 1 << exponent
        if 3 * size > _free_memory():
            continue
        model = nn.Sequential(_Twice())
        rounds = 200 if exponent < 20 else 15 if exponent < 28 else 3
        bare, watched = _added(model, torch.ones(size // 4), rounds, taps="0:output")
        rows.append(
            _row("size", _bytes(size), watched - bare, (watched - bare) / size * 1e9 * 1024, "ns a KiB")
        )
    return rows


def _added(model: nn.Module, x: Tensor, rounds: int, taps: str = "*:output") -> tuple[float, float]:
    """Seconds of a bare pass and of a watched one."""
    with torch.no_grad(), tt.watch(model, None, taps) as watch:
        bare = nn.Sequential(*model)  # the same modules would bring their hooks
        for index, child in enumerate(bare):
            bare[index] = type(child)()

        def watched() -> None:
            with watch.step():
                model(x)

        measured = compare(
            {"bare": case(lambda: bare(x)), "watched": case(watched)}, base="bare", rounds=rounds
        )
    return measured["bare"].seconds, measured["watched"].seconds


def run_steps(quick: bool = False) -> list[dict[str, Any]]:
    """One watch over all steps; what it has cost when 100, 1,000 … of them are done."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    rows = []
    with tempfile.TemporaryDirectory() as folder, tt.watch(model, folder, "*:output") as watch:
        done, begin, at_start = 0, time.process_time(), 0
        for goal in (100, 1000, 10_000) if quick else (100, 1000, 10_000, 100_000):
            for _ in range(goal - done):
                with watch.step(), torch.no_grad():
                    model(x)
            steps, done = goal - done, goal
            spent = time.process_time() - begin
            watch.flush()
            gc.collect()
            memory = resident_memory()
            at_start = at_start or memory
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files)
            row = _row("steps", f"{goal:,}", spent, spent / steps * 1e6, "µs a step, model included")
            growth = (memory - at_start) / _MIB
            row["memory"] = f"{growth:+.1f} MiB since step 100; run {_bytes(size)} in {len(files)} files"
            if goal == 100_000:
                row |= {"bar": "≤ 20 MiB", "holds": growth <= 20}
            rows.append(row)
            begin = time.process_time()
    return rows


def _row(what: str, amount: str, seconds: float, unit_cost: float, unit: str) -> dict[str, Any]:
    return {
        "over": what,
        "amount": amount,
        "added": f"{seconds * 1e3:,.3f} ms",
        "cost": f"{unit_cost:,.2f} {unit}",
        "memory": "",
        "bar": "",
        "holds": "",
    }


def _bytes(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:.3g} GiB"


def resident_memory() -> int:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
