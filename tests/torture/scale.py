"""Much of everything: many steps, many sites, a reader and a writer at once, two processes in one folder."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
from tests.store.records import SITES, number, record
from tests.torture.damage import Tally

from torchtap.store.read.reader import open_run
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

__all__ = ["many_sites", "many_steps", "reader_beside_writer", "two_writers"]


def many_steps(count: int) -> Tally:
    """A run of so many steps."""
    tally, sites, statistics = Tally(), ("a:output", "b:output"), ("mean", "std")
    with tempfile.TemporaryDirectory() as name:
        started = time.process_time()
        with RunWriter(Path(name) / "run", manifest={}) as writer:
            for step in range(count):
                block = ScalarBlock(sites, statistics, np.full((2, 2), float(step)))
                writer.write(StepRecord(step, None, None, "train", float(step), (block,), ()))
        tally["milliseconds to write"] = round(1000 * (time.process_time() - started))
        started = time.process_time()
        run = open_run(Path(name) / "run")
        found = run.series("a:output", "mean")
        tally["milliseconds to open and read a series"] = round(1000 * (time.process_time() - started))
        assert np.array_equal(found.steps, np.arange(count))
        assert np.array_equal(found.values, np.arange(count, dtype=float))
        assert not run.problems
        tally["steps"] = count
        tally["files"] = len(list(Path(name).rglob("*.safetensors")))
    return tally


def many_sites(count: int) -> Tally:
    """A run of so many sites."""
    tally = Tally()
    sites = tuple(f"layers.{number_}.attention.projection:output" for number_ in range(count))
    with tempfile.TemporaryDirectory() as name:
        manifest = {"sites": [{"name": site, "class": "Linear", "shape": [1, 2]} for site in sites]}
        with RunWriter(Path(name) / "run", manifest=manifest) as writer:
            for step in range(3):
                block = ScalarBlock(sites, ("mean",), np.arange(count, dtype=float)[:, None] + step)
                writer.write(StepRecord(step, None, None, "train", float(step), (block,), ()))
        started = time.process_time()
        run = open_run(Path(name) / "run")
        assert len(run.sites()) == count
        matrix = run.matrix("mean")
        assert np.array_equal(matrix.values, np.arange(count, dtype=float)[:, None] + np.arange(3))
        tally["milliseconds to open and read everything"] = round(1000 * (time.process_time() - started))
        tally["sites"] = count
    return tally


def _write_until(folder: str, seconds: float, rank: int) -> None:
    writer = RunWriter(folder, manifest={}, rank=rank, flush_seconds=0.01)
    end, step = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        writer.write(record(step, tensors=step % 2, size=16))
        step += 1
        time.sleep(0.0005)
    writer.close()


def reader_beside_writer(seconds: float) -> Tally:
    """A reader that looks again and again while a writer records and merges: no error, no half step, none lost."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = str(Path(name) / "run")
        context = multiprocessing.get_context("fork")
        writing = context.Process(target=_write_until, args=(folder, seconds, 0))
        writing.start()
        while not list(Path(name).rglob("scalars-*")) and writing.is_alive():
            time.sleep(0.01)
        run, seen = open_run(folder), 0
        while writing.is_alive():
            run.refresh()
            steps = run.steps().tolist()
            assert steps == list(range(len(steps))), "a step is missing"
            assert len(steps) >= seen, "what was seen is gone"
            seen = len(steps)
            assert len(run.series(SITES[1], "std").steps) >= seen  # more where it had to look again
            if seen > 1:
                last = seen - 1 - (seen % 2)
                assert run.array(SITES[0], last if last % 2 else last - 1) is not None
            tally.count("looks")
        writing.join()
        run.refresh()
        assert run.closed
        assert not run.problems, run.problems
        tally["steps"] = len(run.steps())
    return tally


def two_writers(seconds: float) -> Tally:
    """Two processes that record the same rank into one folder get an attempt each; nothing of either is lost."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = str(Path(name) / "run")
        context = multiprocessing.get_context("fork")
        both = [context.Process(target=_write_until, args=(folder, seconds, 0)) for _ in range(2)]
        for each in both:
            each.start()
        for each in both:
            each.join()
        run = open_run(folder)
        assert run.attempts == [0, 1]
        for attempt in run.attempts:
            alone = open_run(folder, attempt=attempt)
            steps = alone.steps().tolist()
            assert steps == list(range(len(steps)))
            assert alone.series(SITES[0], "mean").values.tolist() == [number(step, 0, 0) for step in steps]
            assert not alone.problems
            tally["steps"] = tally.get("steps", 0) + len(steps)
        tally["processes"] = 2
    return tally
