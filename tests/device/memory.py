"""Count peak memory on the test device by its allocator: ``python -m tests.device.memory [--size "103 M"]``.

The models and cases are those of `benchmarks.memory`, which measures the host. `allowed` is 2 % of the bytes of the
parameters and 64 MiB; cases that hold whole tensors on purpose have no bar.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings

import torch
from benchmarks import memory
from tests.device import lag

_MIB = 1 << 20
_HOLD_TENSORS = ("capture of outputs", "compare")


def peak(size: str, case: str) -> tuple[int, int]:
    """Return the peak of a case beyond what was allocated before, and the bytes of the parameters."""
    gc.collect()
    lag.reset()
    start = lag.load().bytes(0)[0]
    torch.manual_seed(0)
    model = memory._Gpt(*memory._SIZES[size]).to("lag")
    lag.load().reset_peak(0)
    memory._work(model, case)
    lag.settle()
    assert lag.counts()["races"] == lag.counts()["faults"] == 0
    parameters = sum(each.numel() * each.element_size() for each in model.parameters())
    return lag.load().bytes(0)[1] - start, parameters


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.device.memory", description=__doc__)
    parser.add_argument("--size", default="103 M", choices=list(memory._SIZES))
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    asked = parser.parse_args()
    lag.load()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = [each for each in memory.cases(True) if asked.only in each]
    plain: dict[str, int] = {}
    over = 0
    print(
        "| case | plain | added | of the parameters | allowed | holds |\n| --- | --- | --- | --- | --- | --- |"
    )
    for case in cases:
        base = memory._base_of(case)
        if base not in plain:
            plain[base] = peak(asked.size, base)[0]
        found, parameters = peak(asked.size, case)
        added, allowed = found - plain[base], parameters // 50 + 64 * _MIB
        bar = case not in _HOLD_TENSORS
        over += bar and added > allowed
        verdict = f"{allowed / _MIB:.0f} MiB | {'yes' if added <= allowed else 'NO'}" if bar else " | "
        figures = f"{plain[base] / _MIB:,.0f} MiB | {added / _MIB:,.1f} MiB | {added / parameters:.1%}"
        print(f"| {case} | {figures} | {verdict} |", flush=True)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
