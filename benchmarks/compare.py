"""Comparing two recordings: memory and speed beside plain reading, and the planted faults.

The two recordings hold 64 whole tensors each, 4 GiB a side, in eight runs, and differ by rounding. Reading means the
same files, read into one buffer, once. Each run is written, read and compared in turn, and deleted, so that both meet
the same machine and the disk holds an eighth of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.corpus.planted_faults import cases, everywhere, judge

import torchtap as tt
from torchtap.store.record import StepRecord, TensorItem
from torchtap.store.write.writer import RunWriter

__all__ = ["run"]

TENSORS = 64
PARTS = 8


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of the large comparison, then of the planted faults."""
    return [*_large(mebibytes=4 if quick else 64), *_planted(every=6 if quick else 1)]


def _large(mebibytes: int) -> list[dict[str, Any]]:
    """Write one part of both recordings, read it, compare it, delete it; then the next."""
    spent = {"read": [0.0, 0.0], "compare": [0.0, 0.0]}  # seconds, and seconds of CPU time
    grown = 0
    with tempfile.TemporaryDirectory() as folder:
        for n in range(PARTS):
            pair = Path(folder) / f"reference{n}", Path(folder) / f"target{n}"
            _write(pair[0], mebibytes, n, factor=1.0)
            _write(pair[1], mebibytes, n, factor=1.0 + 2.0**-22)
            actions = {"read": partial(_read, pair), "compare": partial(_compare, pair)}
            if n == 0:
                tt.compare(*pair, steps=[0])  # what is imported once does not count
            with _PeakMemory() as memory:
                # In turn, so that what slows the machine down for a while slows both.
                for name in ("read", "compare") if n % 2 else ("compare", "read"):
                    begin = time.perf_counter(), time.process_time()
                    actions[name]()
                    spent[name][0] += time.perf_counter() - begin[0]
                    spent[name][1] += time.process_time() - begin[1]
            grown = max(grown, memory.grown)
            for run in pair:
                shutil.rmtree(run)
    size = 2 * TENSORS * mebibytes / 1024
    ratio, busy = (spent["compare"][at] / spent["read"][at] for at in (0, 1))
    return [
        {
            "case": f"two recordings, {size:.3g} GiB together: memory",
            "measured": f"{grown / 2**20:.0f} MiB more at the peak",
            "bar": "≤ 256 MiB",
            "holds": grown <= 256 << 20,
        },
        {
            "case": f"two recordings, {size:.3g} GiB together: time beside reading both",
            "measured": f"{ratio:.2f} × ({spent['compare'][0]:.1f} s, reading {spent['read'][0]:.1f} s; "
            f"CPU time {busy:.2f} ×)",
            "bar": "≤ 1.3 ×",
            "holds": ratio <= 1.3,
        },
    ]


def _compare(pair: tuple[Path, Path]) -> None:
    result = tt.compare(*pair)
    assert len(result.steps) == TENSORS // PARTS


def _write(folder: Path, mebibytes: int, part: int, factor: float) -> None:
    with RunWriter(folder, manifest={"sites": []}) as writer:
        for step in range(TENSORS // PARTS):
            seed = torch.Generator().manual_seed(part * PARTS + step)
            value = torch.randn(mebibytes << 18, generator=seed).mul_(factor)
            item = TensorItem("layer:output", "value", "full", value)
            writer.write(StepRecord(step, None, None, "eval", time.time(), (), (item,)))


def _read(pair: tuple[Path, Path]) -> None:
    """All bytes of both, once, into one buffer."""
    buffer = bytearray(64 << 20)
    for run in pair:
        for path in sorted(run.rglob("tensors-*")):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


class _PeakMemory:
    """The largest resident size inside a block, beyond that at its beginning; looked at every few milliseconds."""

    def __enter__(self) -> _PeakMemory:
        self._done = threading.Event()
        self._start = self._peak = _resident()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self._peak = max(self._peak, _resident())

    @property
    def grown(self) -> int:
        return self._peak - self._start


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _planted(every: int) -> list[dict[str, Any]]:
    judged = (judge(case, tt.compare) for case in [*cases(), *everywhere()][::every])
    outcomes = [outcome for outcome in judged if outcome is not None]
    faults = [outcome for outcome in outcomes if not outcome.case.harmless]
    harmless = [outcome for outcome in outcomes if outcome.case.harmless]
    found, alarms = sum(o.right for o in faults), sum(not o.right for o in harmless)
    missed = ", ".join(outcome.case.name for outcome in outcomes if not outcome.right)
    return [
        {
            "case": f"planted faults, {len(faults)} cases: first module right",
            "measured": f"{found / len(faults):.1%}" + (f", missed: {missed}" if missed else ""),
            "bar": "≥ 97 %",
            "holds": found / len(faults) >= 0.97,
        },
        {
            "case": f"harmless changes, {len(harmless)} cases: false alarms",
            "measured": f"{alarms / len(harmless):.1%}",
            "bar": "≤ 1 in 80",
            "holds": 80 * alarms <= len(harmless),
        },
    ]


if __name__ == "__main__":
    from benchmarks.timing import table

    print(table(run()))
