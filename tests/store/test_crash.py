"""A recording that dies: whatever was flushed is there and right, and the torn rest is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.store.records import SITES, STATISTICS, image, number

from torchtap.store.files.layout import TEMPORARY
from torchtap.store.read.reader import open_run

# Forks one recording after another and kills each at a random moment. Imports no torch, so that it starts at once.
LAUNCHER = """
import json, os, random, signal, sys, time
from pathlib import Path
from tests.store.records import record
from torchtap.store.write.writer import RunWriter

root, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
os.fsync = lambda descriptor: None  # what a process wrote outlives its death without; merging starts sooner

def record_until_killed(folder, told):
    writer = RunWriter(folder, manifest={}, flush_seconds=0.004)
    step = 0
    while True:
        writer.write(record(step, tensors=1 + step % 3, size=(16, 4096)[step % 2]))
        if step % 5 == 4:
            writer.flush()
            os.write(told, step.to_bytes(4, "little"))
        step += 1

flushed = {}
for index in range(count):
    folder = root / str(index)
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        record_until_killed(folder, mouth)
    os.close(mouth)
    for _ in range(chance.randrange(1, 12)):
        last = int.from_bytes(os.read(ear, 4), "little")  # a flush
    time.sleep(chance.random() * 0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while answer := os.read(ear, 4):
        last = int.from_bytes(answer, "little")
    os.close(ear)
    flushed[index] = last
print(json.dumps(flushed))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, int]:
    """Fifty recordings that were killed, and the last step that each had flushed."""
    root = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(root), "50", "7"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return {root / name: step for name, step in json.loads(done.stdout).items()}


def test_after_kill_9_everything_flushed_is_there_and_right(killed: dict[Path, int]) -> None:
    assert len(killed) == 50
    assert len(set(killed.values())) > 5, "the moments were not random"
    for folder, flushed in killed.items():
        run = open_run(folder)
        steps = run.steps()
        assert steps.tolist() == list(range(len(steps)))
        assert len(steps) > flushed
        for site, name in enumerate(SITES):
            for kind, statistic in enumerate(STATISTICS):
                expected = [number(step, site, kind) for step in steps.tolist()]
                assert run.series(name, statistic).values.tolist() == expected
        stored = {(ref.step, ref.field) for ref in run.tensors()}
        for step in steps.tolist():
            for index in range(1 + step % 3):
                field = f"value{index}" if index else "value"
                assert (step, field) in stored
                found = run.array(SITES[0], step, field)
                assert np.array_equal(found, image(step + index, (16, 4096)[step % 2]))


def test_after_kill_9_the_torn_rest_is_reported(killed: dict[Path, int]) -> None:
    for folder in killed:
        run = open_run(folder)
        assert run.status == "interrupted"
        assert not run.closed
        problems = run.problems
        assert len(problems) == 1
        assert "interrupted" in problems[0]
        left = list(folder.rglob(f"{TEMPORARY}*"))
        assert not left or f"{len(left)} unfinished" in problems[0]


def test_a_process_that_ends_without_closing_closes_its_run(tmp_path: Path) -> None:
    code = """
import sys
from tests.store.records import record
from torchtap.store.write.writer import RunWriter
writer = RunWriter(sys.argv[1], manifest={})
for step in range(10):
    writer.write(record(step))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    run = open_run(tmp_path)
    assert run.closed
    assert run.steps().tolist() == list(range(10))
    assert run.problems == []


def test_a_forked_child_neither_writes_nor_closes_the_run(tmp_path: Path) -> None:
    code = """
import os, sys
from tests.store.records import record
from torchtap.store.write.writer import RunWriter
with RunWriter(sys.argv[1], manifest={}) as writer:
    writer.write(record(0))
    child = os.fork()
    if child == 0:
        writer.write(record(1))
        writer.flush()
        writer.close()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.write(record(2))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    assert open_run(tmp_path).steps().tolist() == [0, 2]
