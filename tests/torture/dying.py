"""Recordings that are killed at a random moment: whatever was flushed is there, and right.

Each recording flushes every few milliseconds, so that segments are merged all the time: many of the kills hit the
writer while it merges. Some have two ranks in one folder, each killed at its own moment.
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
from torchtap.store.write.writer import RunWriter

root, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
os.fsync = lambda descriptor: None  # what a process wrote outlives its death without; merging starts sooner

def record_until_killed(folder, rank, told):
    writer = RunWriter(folder, manifest={}, rank=rank, world=2, flush_seconds=0.004)
    step = 0
    while True:
        writer.write(record(step, tensors=1 + step % 3, size=(16, 4096)[step % 2]))
        if step % 5 == 4:
            writer.flush()
            os.write(told, step.to_bytes(4, "little"))
        step += 1

flushed = {}
for index in range(count):
    folder, living = root / str(index), []
    for rank in range(2 if index % 4 == 0 else 1):
        ear, mouth = os.pipe()
        child = os.fork()
        if child == 0:
            record_until_killed(folder, rank, mouth)
        os.close(mouth)
        living.append((rank, child, ear))
    for rank, child, ear in living:
        os.read(ear, 4)  # the first flush
    for rank, child, ear in living:
        time.sleep(chance.random() * chance.choice((0.01, 0.06, 0.2)))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        last = 4
        while answer := os.read(ear, 4):
            last = int.from_bytes(answer, "little")
        os.close(ear)
        flushed[f"{index} {rank}"] = last
print(json.dumps(flushed))
"""


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
            for key, flushed in json.loads(done.stdout).items():
                index, rank = key.split()
                _check(Path(name) / index, int(rank), flushed, tally)
    return tally


def _check(folder: Path, rank: int, flushed: int, tally: Tally) -> None:
    run = open_run(folder, rank=rank)
    steps = run.steps().tolist()
    assert steps == list(range(len(steps))), "a step in the middle is missing"
    assert len(steps) > flushed, f"step {flushed} was flushed, {len(steps)} are there"
    assert run.status == "interrupted"
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
    tally.count("recordings killed")
    tally["flushed steps, all there"] = tally.get("flushed steps, all there", 0) + flushed + 1
    if any(
        "_" in path.name and path.name.split("-")[1] != path.name.split("-")[2].split("_")[0]
        for path in folder.rglob("scalars-*")
    ):
        tally.count("of them after a merge")
