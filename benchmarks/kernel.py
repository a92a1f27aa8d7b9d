"""All twelve statistics of one tensor, beside ``x.sum()`` of the same tensor.

``python -m benchmarks.kernel`` prints the table. ``bandwidth`` is that of the statistics as a share of the sum's,
with its quartiles; it is to be 0.7 at least, and of integers 0.6 (int64) and 0.5 (uint8). With one thread the clock is
the process's CPU time; with several it is the wall's, since CPU time would count the threads one after the other.
After a ReLU half of the numbers are zeros, which are counted one by one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.timing import case, compare
from torchtap.reduce import StatsBlock, kernel

__all__ = ["run"]

_SIZES = (1 << 10, 32 << 10, 1 << 20, 16 << 20, 256 << 20)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
_BYTES_A_ROUND = 8 << 20
_BARS = {torch.int64: 0.6, torch.uint8: 0.5}  # the others': 0.7


def run(*, quick: bool = False, threads: Sequence[int] = (1, 2)) -> list[dict[str, Any]]:
    """One row for each dtype, size and number of threads: microseconds of both, and the ratio of bandwidths."""
    before = torch.get_num_threads()
    rows = []
    try:
        for number in threads:
            torch.set_num_threads(number)
            for dtype in _DTYPES:
                for size in _SIZES:
                    often = dtype is torch.float32 or (dtype in (torch.bfloat16, torch.float16) and not quick)
                    if often or size == _SIZES[-1]:
                        rows.append(_row(dtype, size, rounds=9 if quick else 31, threads=number))
            rows += [
                _row(torch.float32, size, rounds=9 if quick else 31, threads=number, rectified=True)
                for size in _SIZES[2:]
            ]
    finally:
        torch.set_num_threads(before)
    return rows


def _row(
    dtype: torch.dtype, size: int, *, rounds: int, threads: int, rectified: bool = False
) -> dict[str, Any]:
    torch.manual_seed(0)
    count = size // dtype.itemsize
    value = torch.randn(min(count, 1 << 22)).mul_(30).to(dtype)
    if rectified:
        value.clamp_(min=0)
    value = value.repeat(-(-count // value.numel()))[:count].clone()
    block = StatsBlock(1)
    # torch adds up narrow integers one by one, far from what memory gives; the same bytes as floats are the yardstick.
    yardstick = value if dtype.is_floating_point or dtype.itemsize == 8 else value.view(torch.float32)
    measured = compare(
        {"sum": case(yardstick.sum), "statistics": case(lambda: block.measure_into(0, 0, value))},
        base="sum",
        rounds=rounds,
        repeats=max(1, min(2000, _BYTES_A_ROUND // size)),
        clock=time.process_time if threads == 1 else time.perf_counter,
    )
    ours, theirs, bar = measured["statistics"], measured["sum"], _BARS.get(dtype, 0.7)
    return {
        "dtype": str(dtype).removeprefix("torch.") + (", after a ReLU" if rectified else ""),
        "KiB": size >> 10,
        "threads": threads,
        "sum µs": round(theirs.seconds * 1e6, 1),
        "statistics µs": round(ours.seconds * 1e6, 1),
        "GB/s": round(size / ours.seconds / 1e9, 1),
        "bandwidth": f"{1 / ours.ratio:.2f} [{1 / ours.high:.2f}–{1 / ours.low:.2f}]",
        "bar": "" if rectified else f"≥ {bar}",
        "holds": "" if rectified else ours.verdict(1 / bar),
    }


if __name__ == "__main__":
    path = "the native kernel" if kernel.native is not None else "torch ops: the native kernel is not built"
    rows = run()
    print(f"statistics by {path}\n")
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
