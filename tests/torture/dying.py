"""Recordings that are killed: whatever was flushed is there, and right.

A recording dies in one of three ways: at a random moment; at a random call of the operating system while it merges,
in the middle of it where it writes; or so while it closes. Each time it is SIGKILL to the process itself. Some have two
ranks in one folder, each with a death of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tests.store.records import SITES, STATISTICS, image, number
from tests.torture import limit
from tests.torture.damage import Tally

from torchtap.store.read.reader import open_run

__all__ = ["killed_recordings"]

# Forks one recording after another; imports no torch, so that it starts at once.
_LAUNCHER = """
import json, os, random, signal, sys, time
from pathlib import Path
from tests.store.records import record
from torchtap.store.files import folder as destination
from torchtap.store.write.segments import Segments
from torchtap.store.write.writer import RunWriter

root, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
os.fsync = lambda descriptor: None  # what a process wrote outlives its death without; merging starts sooner

CALLS = ("open", "close", "write", "writev", "replace", "unlink")

class DeadlyOS:
    # The store's `os`. Once armed, it kills the process at the n-th call; what that call would write is half written.
    def __init__(self):
        self.left = None
    def __getattr__(self, name):
        call = getattr(os, name)
        if self.left is None or name not in CALLS:
            return call
        def one_of_the_last(*args, **options):
            self.left -= 1
            if self.left <= 0:
                if name == "writev":
                    os.write(args[0], bytes(args[1][0])[: len(args[1][0]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)
        return one_of_the_last

def record_until_killed(folder, rank, told, way, calls):
    destination.os = destination.system.os = deadly = DeadlyOS()
    write = Segments._write
    def merging(self, replaced, *args):
        if replaced and deadly.left is None:
            deadly.left = calls
        write(self, replaced, *args)
    if way == "merge":
        Segments._write = merging
    writer = RunWriter(folder, manifest={}, rank=rank, world=2, flush_seconds=0.004)
    step = 0
    while step < 5000:  # none lives that long
        writer.write(record(step, tensors=1 + step % 3, size=(16, 4096)[step % 2]))
        if step % 5 == 4:
            writer.flush()
            os.write(told, step.to_bytes(4, "little"))
        step += 1
        if way == "close" and step == 40:
            deadly.left = calls
            writer.close()
            os._exit(0)

died = {}
for index in range(count):
    folder, living = root / str(index), []
    for rank in range(2 if index % 4 == 0 else 1):
        way = chance.choice(("moment", "merge", "merge", "close"))
        calls = chance.randrange(1, 30 if way == "merge" else 120)
        ear, mouth = os.pipe()
        child = os.fork()
        if child == 0:
            record_until_killed(folder, rank, mouth, way, calls)
        os.close(mouth)
        living.append((rank, child, ear, way))
    for rank, child, ear, way in living:
        last = 0
        if way == "moment":
            for _ in range(chance.randrange(1, 20)):
                last = os.read(ear, 4)
            last = int.from_bytes(last, "little")
            time.sleep(chance.random() * 0.02)
            os.kill(child, signal.SIGKILL)
        while answer := os.read(ear, 4):
            last = int.from_bytes(answer, "little")
        os.close(ear)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        died[f"{index} {rank}"] = last, way if killed else "closed"
print(json.dumps(died))
"""

_DEATHS = {
    "moment": "at a random moment",
    "merge": "in a merge",
    "close": "in closing",
    "closed": "closed in time",
}


def killed_recordings(count: int, seed: int) -> Tally:
    """Kill so many recordings, ranks included, and read what they left."""
    tally = Tally()
    for start in range(0, count, 20):
        if limit.over():
            break
        with tempfile.TemporaryDirectory() as name:
            done = subprocess.run(
                [sys.executable, "-c", _LAUNCHER, name, str(min(20, count - start)), str(seed + start)],
                capture_output=True,
                text=True,
                check=True,
                cwd=Path(__file__).parents[2],
            )
            for key, (flushed, way) in json.loads(done.stdout).items():
                index, rank = key.split()
                _check(Path(name) / index, int(rank), flushed, way)
                tally.count(f"recordings, {_DEATHS[way]}")
                tally["flushed steps, all there"] = tally.get("flushed steps, all there", 0) + flushed + 1
    return tally


def _check(folder: Path, rank: int, flushed: int, way: str) -> None:
    run = open_run(folder, rank=rank)
    steps = run.steps().tolist()
    assert steps == list(range(len(steps))), "a step in the middle is missing"
    assert len(steps) > flushed, f"step {flushed} was flushed, {len(steps)} are there"
    # A process that dies in closing may have said its last word already.
    assert run.status == "interrupted" or (run.closed and way.startswith("close"))
    assert all("interrupted" in problem for problem in run.problems), run.problems
    for site, name in enumerate(SITES):
        for kind, statistic in enumerate(STATISTICS):
            assert run.series(name, statistic).values.tolist() == [number(step, site, kind) for step in steps]
    stored = {(ref.step, ref.field) for ref in run.tensors()}
    for step in steps:
        for index in range(1 + step % 3):
            field = f"value{index}" if index else "value"
            assert (step, field) in stored
            if step % 7 == 0 or step > flushed - 10:
                assert np.array_equal(
                    run.array(SITES[0], step, field), image(step + index, (16, 4096)[step % 2])
                )
