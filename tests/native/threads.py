"""``python -m tests.native.threads [times]``: four threads call a model at once under a capture that hears them all.

Each time is a process of its own with 600 rounds. In a round each thread calls a chain of modules of its own: more
sites than the first rows of statistics hold, and values so large that the kernel lets go of the interpreter.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import torch
from torch import Tensor, nn

import torchtap as tt

ROUNDS, THREADS, LENGTH, ELEMENTS = 600, 4, 8, 70_001


class Chain(nn.Sequential):
    """Each module adds one, so that a site's values tell which it is."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = part(x + 1)
        return x


def once() -> int:
    """How many sites were wrong."""
    torch.set_num_threads(1)
    starts = [torch.arange(float(ELEMENTS)) * (number + 1) for number in range(THREADS)]
    wrong = 0
    for _ in range(ROUNDS):
        model = nn.ModuleList(Chain(*(nn.Identity() for _ in range(LENGTH))) for _ in starts)
        with tt.capture(model, "*:output", keep=tt.Stats(), all_threads=True) as seen:
            threads = [threading.Thread(target=model[n], args=(start,)) for n, start in enumerate(starts)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for number, start in enumerate(starts):
            for part in range(LENGTH):
                found = seen[f"{number}.{part}:output"]
                expected = (ELEMENTS, part + 1, float((start + part + 1)[-1]))
                wrong += (found["count"], found["min"], found["max"]) != expected
    return wrong


def main() -> int:
    """Start the processes; exit code 1 where one died or had a site wrong."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    failed = 0
    for number in range(times):
        done = subprocess.run(
            [sys.executable, "-m", "tests.native.threads", "once"], capture_output=True, text=True
        )
        if done.returncode != 0 or done.stdout.strip() != "0":
            failed += 1
            print(
                f"{number}: exit code {done.returncode}, wrong sites: {done.stdout.strip()}\n{done.stderr[-2000:]}"
            )
    print(f"{times} times {ROUNDS} rounds of {THREADS * LENGTH} sites: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["once"]:
        print(once())
    else:
        sys.exit(main())
