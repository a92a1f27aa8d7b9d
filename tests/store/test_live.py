"""Reading a run while it is being written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.store.records import SITES, image, number, record

from torchtap.store.read.reader import open_run
from torchtap.store.write.writer import RunWriter

RECORDING = """
import os, sys
os.fsync = lambda descriptor: None
from tests.store.records import record
from torchtap.store.write.writer import RunWriter
with RunWriter(sys.argv[1], manifest={}, flush_seconds=0.001) as writer:
    writer.write(record(0, tensors=2))
    writer.flush()
    print("ready", flush=True)
    step = 1
    while step < 600 or not os.path.exists(sys.argv[2]):
        writer.write(record(step, tensors=2 * (step % 10 == 0)))
        if step % 3 == 0:
            writer.flush()
        step += 1
"""


def test_a_polling_reader_never_errs_and_never_sees_half_a_step(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    child = subprocess.Popen(
        [sys.executable, "-c", RECORDING, str(tmp_path / "run"), str(enough)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    child.stdout.readline()
    run = open_run(tmp_path / "run")
    before = looks = 0
    chance = np.random.default_rng(0)
    while run.recording:
        run.refresh()
        steps = run.steps()
        assert steps.tolist() == list(range(len(steps))), "a step is missing or there twice"
        assert len(steps) >= before, "a step that was seen has gone"
        before = len(steps)
        found = run.series(SITES[1], "std")
        assert found.values.tolist() == [number(step, 1, 1) for step in found.steps.tolist()]
        assert len(found.steps) >= before
        step = int(chance.integers(0, before)) // 10 * 10
        for index in range(2):
            field = f"value{index}" if index else "value"
            assert np.array_equal(run.array(SITES[0], step, field), image(step + index))
        assert not [problem for problem in run.problems if "interrupted" not in problem]
        looks += 1
        if looks == 20:
            enough.touch()
    assert child.wait() == 0
    child.stdout.close()
    run.refresh()
    count = len(run.steps())
    assert count >= 600
    assert len(run.tensors()) == 2 * len(range(0, count, 10))
    assert run.problems == []


def test_a_reader_that_does_not_refresh_survives_merging(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, manifest={})
    for step in range(5):
        writer.write(record(step, tensors=1))
        writer.flush()
    run = open_run(tmp_path)
    run.tensors()
    writer.close()  # merges and removes what the reader knows
    assert run.series(SITES[0], "mean").steps.tolist() == list(range(5))
    assert np.array_equal(run.array(SITES[0], 3), image(3))


def test_following_yields_each_step_once_and_ends_with_the_recording(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, manifest={})
    writer.write(record(0))
    writer.flush()
    followed = open_run(tmp_path).follow(poll=0.01)
    seen = [next(followed)]
    for step in range(1, 5):
        writer.write(record(step))
        writer.flush()
        seen.append(next(followed))
    writer.close()
    assert [*seen, *followed] == [0, 1, 2, 3, 4]


def test_following_a_run_whose_writer_died_ends(tmp_path: Path) -> None:
    code = """
import os, sys
from tests.store.records import record
from torchtap.store.write.writer import RunWriter
writer = RunWriter(sys.argv[1], manifest={})
writer.write(record(0))
writer.flush()
os._exit(1)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=Path(__file__).parents[2])
    assert list(open_run(tmp_path).follow(poll=0.01)) == [0]
