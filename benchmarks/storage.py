"""Writing runs and reading them back, beside plain writes and copies of the same bytes.

Neither side syncs: both are done when the operating system has the bytes. Ratios are of neighbouring rounds in one
process; each row has the median and the quartiles.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import one_thread, quartiles
from torchtap.store.read.reader import open_run
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem
from torchtap.store.write.pool import HostPool
from torchtap.store.write.writer import RunWriter

__all__ = ["run"]

_SIZES = (256 << 10, 1 << 20, 4 << 20)
_PIECE = 256 << 20
_WARM_UP = 4  # pieces: the pool's memory, and the system's for files, is touched for the first time
_STATISTICS = ("count", "mean", "std", "min", "max", "absmax", "l1", "l2", "rms", "zeros", "nans", "infs")


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows for the tables."""
    with one_thread(), _no_sync():
        return [
            _full_tensors(total=(256 << 20) if quick else (2 << 30), rounds=4),
            _blocked(rounds=20 if quick else 60),
            *_numbers(steps=1000, rounds=5),
            *_long_series(steps=10_000 if quick else 100_000),
            _one_tensor(count=10_000 if quick else 100_000),
            *_any_length(steps=20_000 if quick else 1_000_000, limit=(200 if quick else 2000) * 10**6),
        ]


def _row(case: str, measured: str, bar: str = "", holds: bool | str = "") -> dict[str, Any]:
    return {"case": case, "measured": measured, "bar": bar, "holds": holds}


def _spread(values: list[float], form: str = "{:.2f}") -> str:
    low, middle, high = (form.format(value) for value in quartiles(values))
    return f"{middle} [{low}–{high}]"


@contextmanager
def _no_sync() -> Iterator[None]:
    original = os.fsync
    os.fsync = lambda descriptor: None
    try:
        yield
    finally:
        os.fsync = original


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _wall(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _steps(total: int) -> list[list[Tensor]]:
    """Steps of tensors that are ``total`` bytes together; the same 128 MiB of random numbers over and over."""
    generator = torch.Generator().manual_seed(0)
    step_bytes = 3 * sum(_SIZES)
    cycle = [
        [torch.randn(size // 4, generator=generator) for _ in range(3) for size in _SIZES]
        for _ in range((128 << 20) // step_bytes)
    ]
    return [cycle[index % len(cycle)] for index in range(total // step_bytes)]


def _record(step: int, tensors: Sequence[Tensor], pool: HostPool) -> StepRecord:
    items = tuple(
        TensorItem(f"blocks.{number}:output", "value", "full", pool.copy(value))
        for number, value in enumerate(tensors)
    )
    return StepRecord(step, None, None, "train", 0.0, (), items)


def _full_tensors(total: int, rounds: int) -> dict[str, Any]:
    """Copy, checksum and write against write alone: on two free cores the first two go on beside the third.

    One recording, in pieces; between two pieces the same bytes are written plainly. What both left is removed after
    each pair, so that neither is given memory by the system that the other was not.
    """
    steps = _steps(min(total, _PIECE))
    nbytes = len(steps) * 3 * sum(_SIZES)
    pool = HostPool()
    gc.collect()
    gc.freeze()  # what was imported before is not looked through again in the middle of a round
    ratios, speeds, others, work = [], [], [], []
    with _scratch() as folder, RunWriter(folder / "run", manifest={}) as writer:
        ways = (
            lambda: _plain_write(folder / "plain", steps),
            lambda: _recorded(writer, steps, pool),
        )
        for piece in range(_WARM_UP + rounds * round(total / nbytes)):
            wall, cpu = [0.0, 0.0], [0.0, 0.0]
            for way in (0, 1) if piece % 2 else (1, 0):
                begin = time.process_time()
                wall[way] = _wall(ways[way])
                cpu[way] = time.process_time() - begin
            for file in (folder / "plain", *folder.glob("run/*/*/tensors-*")):
                file.unlink()
            if piece >= _WARM_UP:
                ratios.append(wall[0] / wall[1])
                speeds.append(nbytes / wall[1] / 2**30)
                others.append(nbytes / wall[0] / 2**30)
                work.append(cpu[1] / cpu[0])
    assert not writer.lost, writer.lost
    return _row(
        f"full tensors of 256 KiB to 4 MiB, {total / 2**30:.2g} GiB, copied and written, beside write()",
        f"{_spread(ratios)} of its speed; {_spread(speeds)} against {_spread(others)} GiB/s; "
        f"{_spread(work)} of its CPU time, over two threads",
        "≥ 0.8",
        quartiles(ratios)[1] >= 0.8,
    )


def _plain_write(path: Path, steps: list[list[Tensor]]) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    for tensors in steps:
        for value in tensors:
            os.write(descriptor, value.numpy().data)
    os.close(descriptor)


def _recorded(writer: RunWriter, steps: list[list[Tensor]], pool: HostPool) -> None:
    for step, tensors in enumerate(steps):
        writer.write(_record(step, tensors, pool))
    writer.flush()


def _blocked(rounds: int) -> dict[str, Any]:
    """What the training thread spends on a step's tensors, while the disk keeps up, beside one memcpy of them.

    In CPU time of that thread, which neighbours disturb least; nothing in it waits.
    """
    (tensors,) = _steps(3 * sum(_SIZES))
    targets = [torch.empty_like(value) for value in tensors]
    pool = HostPool()
    ratios = []

    def memcpy() -> None:
        for target, value in zip(targets, tensors, strict=True):
            target.copy_(value)

    with _scratch() as folder, RunWriter(folder, manifest={}) as writer:
        for step in range(rounds + 5):
            begin = time.thread_time()
            writer.write(_record(step, tensors, pool))
            ours = time.thread_time() - begin
            writer.flush()
            begin = time.thread_time()
            memcpy()
            plain = time.thread_time() - begin
            if step >= 5:
                ratios.append(ours / plain)
    return _row(
        "training thread, per step of full tensors, beside one memcpy of them",
        f"{_spread(ratios)} of its time",
        "≤ 1.2",
        quartiles(ratios)[1] <= 1.2,
    )


def _write_numbers(folder: Path, sites: int, steps: int) -> float:
    """Record a grid of numbers at each step; returns the seconds that the calls of ``write`` took."""
    names = tuple(f"blocks.{number}.mlp:output" for number in range(sites))
    values = np.random.default_rng(0).random((sites, len(_STATISTICS)))
    spent = 0.0
    with RunWriter(folder, manifest={}) as writer:
        for step in range(steps):
            record = StepRecord(
                step, None, None, "train", 0.0, (ScalarBlock(names, _STATISTICS, values.copy()),), ()
            )
            begin = time.perf_counter()
            writer.write(record)
            spent += time.perf_counter() - begin
    return spent


def _numbers(steps: int, rounds: int) -> list[dict[str, Any]]:
    rates, reads = [], []
    rows = steps * 84 * len(_STATISTICS)
    for _ in range(rounds):
        with _scratch() as folder:
            rates.append(rows / _write_numbers(folder, 84, steps))
            recorded = open_run(folder)
            reads.append(
                1e3 * _wall(lambda recorded=recorded: recorded.series("blocks.41.mlp:output", "std"))
            )  # type: ignore[misc]
    return [
        _row(
            f"{rows:,} numbers: at the caller",
            f"{_spread(rates, '{:.2e}')} a second",
            "≥ 1e6",
            quartiles(rates)[1] >= 1e6,
        ),
        _row(
            f"one series of {steps:,} steps out of them",
            f"{_spread(reads)} ms",
            "≤ 20 ms",
            quartiles(reads)[1] <= 20,
        ),
    ]


def _long_series(steps: int) -> list[dict[str, Any]]:
    with _scratch() as folder:
        _write_numbers(folder, 84, steps)
        files = [path for path in folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        recorded = open_run(folder)
        reads = [1e3 * _wall(lambda: recorded.series("blocks.41.mlp:output", "std")) for _ in range(9)]
        opens = [1e3 * _wall(lambda: open_run(folder)) for _ in range(5)]
    return [
        _row(
            f"one series of {steps:,} steps out of {steps * 84 * len(_STATISTICS):,} numbers",
            f"{_spread(reads)} ms",
            "≤ 20 ms",
            quartiles(reads)[1] <= 20,
        ),
        _row("opening that run", f"{_spread(opens)} ms; {len(files)} files, {size / 2**20:,.0f} MiB"),
    ]


def _one_tensor(count: int) -> dict[str, Any]:
    value = torch.arange(128.0)
    with _scratch() as folder:
        with RunWriter(folder, manifest={}) as writer:
            for step in range(count // 100):
                items = tuple(
                    TensorItem(f"blocks.{number}:output", "value", "full", value + step)
                    for number in range(100)
                )
                writer.write(StepRecord(step, None, None, "train", 0.0, (), items))
        reads = []
        for number in range(9):
            step = number * (count // 1000)
            reads.append(1e3 * _wall(lambda step=step: open_run(folder).array("blocks.7:output", step)))  # type: ignore[misc]
        files = sum(path.is_file() for path in folder.rglob("*"))
    return _row(f"opening a run of {count:,} tensors and reading one", f"{_spread(reads)} ms; {files} files")


def _any_length(steps: int, modules: int = 1200, limit: int = 2_000_000_000) -> list[dict[str, Any]]:
    """Drive the writer as the default plan does: five kinds of sites at every tenth step, a loss at every step."""
    kinds = ("output", "grad_output", "param.weight", "param_grad.weight", "update.weight")
    sites = tuple(f"blocks.{number}:{kind}" for kind in kinds for number in range(modules))
    values = np.random.default_rng(0).random((len(sites), len(_STATISTICS)))
    loss, value = (":value.loss",), ("value",)
    most = 0
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as place:
        folder = Path(place)
        with RunWriter(folder, manifest={}, disk=limit) as writer:
            for step in range(steps):
                blocks = [ScalarBlock(loss, value, np.array([[1.0 / (1 + step)]]))]
                if step % 10 == 0:
                    blocks.append(ScalarBlock(sites, _STATISTICS, values))
                writer.write(StepRecord(step, None, None, "train", 0.0, tuple(blocks), ()))
                if step % 1000 == 0:
                    most = max(most, _size_of(folder))
        size, run = _size_of(folder), open_run(folder)
        shown = run.series("blocks.7:output", "l2").steps
        parts = np.histogram(shown, bins=10, range=(0, steps))[0]
        losses = len(run.series("loss").steps)
        seconds = _wall(lambda: open_run(folder).matrix("l2", sites[:200]))
    what = f"default plan, {steps:,} steps × {len(sites):,} sites, limit {limit / 1e9:.2g} GB"
    return [
        _row(
            what,
            f"{size / 1e9:.3g} GB at the end, {most / 1e9:.3g} GB at most",
            f"≤ {limit / 1e9:.2g} GB",
            most <= limit,
        ),
        _row(
            "points of a series in each tenth of that training",
            f"{', '.join(map(str, parts.tolist()))}; loss {losses:,}; 200 sites in {seconds:.2g} s",
            "each tenth has some",
            bool(parts.min() > 0),
        ),
    ]


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # merged meanwhile
            continue
    return total


if __name__ == "__main__":
    for row in run():
        print(row)
