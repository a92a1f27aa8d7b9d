"""Damaged runs: whatever a disk or a stranger did to the files, a reader gives right data or an error of torchtap."""

from __future__ import annotations

import os
import random
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.store.records import record
from tests.torture import limit

from torchtap.errors import TorchtapError
from torchtap.store.read.reader import Run, open_run
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem
from torchtap.store.write.writer import RunWriter, _open_writers

__all__ = ["Tally", "damaged_runs", "good_run", "memory_disk", "read_all"]

Truth = dict[tuple[Any, ...], Any]
_MOST_KIB = 64 << 10


def memory_disk() -> str | None:
    """A folder that is fast, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Tally(dict[str, int]):
    """How often what happened."""

    def count(self, what: str) -> None:
        self[what] = self.get(what, 0) + 1


def good_run(folder: Path) -> Truth:
    """Two attempts and two ranks of everything that a run can hold; returns all its values."""
    for rank in (0, 1):
        for first, last in ((0, 5), (3, 8)):
            writer = RunWriter(
                folder,
                manifest={"sites": [{"name": "encoder:output", "class": "Linear"}]},
                rank=rank,
                compress="zstd",
            )
            for step in range(first, last):
                made = record(step, tensors=1 + step % 2, size=8)
                blocks = tuple(
                    ScalarBlock(b.sites, b.statistics, b.values + 100 * first) for b in made.scalars
                )
                items = tuple(TensorItem(t.site, t.field, t.reduction, t.value + first) for t in made.tensors)
                writer.write(StepRecord(step, None, None, "train", float(step), blocks, items))
                full = np.full((64, 8), step + 100 * first, np.float32)
                packed = TensorItem("packed:output", "value", "full", full)  # type: ignore[arg-type]
                writer.write(StepRecord(step, None, None, "train", float(step), (), (packed,)))
                writer.event("warning", text=f"step {step}")
                if step % 2:
                    writer.flush()
            if last == 8:
                writer.close()
            else:  # as a process that died leaves it
                writer.flush()
                writer._recorder._place.release()  # type: ignore[union-attr]
                _open_writers.discard(writer)  # as if its process had died
                writer._closed = True
    earlier: Truth = {}
    read_all(open_run(folder, attempt=0), earlier, learn=True)
    truth: Truth = {("earlier", *key): value for key, value in earlier.items()}
    read_all(open_run(folder), truth, learn=True)
    read_all(open_run(folder, rank=1), truth, learn=True)
    return truth


class _EarlierValue(Exception):
    """An earlier attempt's value came through."""


def _same(truth: Truth, key: tuple[Any, ...], value: Any, learn: bool) -> None:
    if learn:
        truth[key] = value
    elif key in truth and truth[key] != value and truth.get(("earlier", *key)) == value:
        raise _EarlierValue
    elif key not in truth or truth[key] != value:
        raise AssertionError(f"{key}: {str(value)[:80]} was read, {str(truth.get(key))[:80]} was written")


def read_all(run: Run, truth: Truth, *, learn: bool = False) -> int:
    """Read everything and hold it against the truth. Returns how many errors of torchtap came in its stead."""
    refused = 0
    repr(run), run.problems, run.events(), run.coverage(), run.clock(), run.manifest
    for step in run.steps().tolist():
        _same(truth, ("step", step), True, learn)
    for site in run.sites():
        for statistic in run.statistics(site):
            try:
                found = run.series(site, statistic)
            except TorchtapError:
                refused += 1
                continue
            for step, value in zip(found.steps.tolist(), found.values.tolist(), strict=True):
                _same(truth, (site, statistic, step), value, learn)
    for ref in run.tensors():
        try:
            array = run.array(ref.site, ref.step, ref.field)
        except TorchtapError:
            refused += 1
            continue
        _same(truth, ("tensor", ref.site, ref.field, ref.step), array.tobytes(), learn)
    return refused


# --- what may happen to a folder ----------------------------------------------------------------------------


def _flip(files: list[Path], chance: random.Random) -> None:
    path = chance.choice(files)
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        if content:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _flip_in_head(files: list[Path], chance: random.Random) -> None:
    path = chance.choice(files)
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 2))):
        if content:
            content[chance.randrange(min(len(content), 3000))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _cut(files: list[Path], chance: random.Random) -> None:
    path = chance.choice(files)
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content) + 1)])


def _zeros(files: list[Path], chance: random.Random) -> None:
    path = chance.choice(files)
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content) + 1)
    stop = min(len(content), start + chance.choice((1, 8, 512, 4096)))
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)


def _insert(files: list[Path], chance: random.Random) -> None:
    path = chance.choice(files)
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content) + 1)
    content[at:at] = chance.randbytes(chance.choice((1, 8, 100)))
    path.write_bytes(content)


def _remove(files: list[Path], chance: random.Random) -> None:
    chance.choice(files).unlink()


def _swap(files: list[Path], chance: random.Random) -> None:
    one, other = chance.choice(files), chance.choice(files)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _rename(files: list[Path], chance: random.Random) -> None:
    path = chance.choice(files)
    numbers = [str(chance.choice((0, 1, 2, 5, 99_999_999))).zfill(8) for _ in range(2)]
    kind = chance.choice(("scalars", "tensors"))
    path.rename(path.with_name(f"{kind}-{min(numbers)}-{max(numbers)}_0-{chance.randrange(20)}.safetensors"))


def _garbage(files: list[Path], chance: random.Random) -> None:
    name = chance.choice(
        ("scalars-00000000-00000009_0-9", "tensors-00000004-00000004_0-9", "scalars-00000050-00000050_0-0")
    )
    (files[0].parent / f"{name}.safetensors").write_bytes(chance.randbytes(chance.randrange(300)))


def _text(files: list[Path], chance: random.Random) -> None:
    """A letter of a text becomes another letter: the kind of damage that stays well-formed."""
    path = chance.choice(files)
    content = bytearray(path.read_bytes())
    letters = [at for at, byte in enumerate(content[:4000]) if chr(byte).isalnum() and byte < 128]
    if letters:
        content[chance.choice(letters)] = ord(chance.choice("abcxyz0189"))
    path.write_bytes(content)


DAMAGES: list[Callable[[list[Path], random.Random], None]] = [
    _flip, _flip_in_head, _cut, _zeros, _insert, _remove, _swap, _rename, _garbage, _text,
]  # fmt: skip


def damaged_runs(count: int, seed: int, *, exports: int = 200) -> Tally:
    """Damage so many copies of a run and read each. Of every ``exports``-th, also every export, page and report."""
    tally = Tally()
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=memory_disk()) as name:
        root = Path(name)
        truth = good_run(root / "good")
        grown = 0  # by how much reading has raised the most that the process ever took
        for number in range(count):
            if limit.over():
                break
            folder = root / "copy"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(root / "good", folder)
            for _ in range(chance.choice((1, 1, 1, 2, 5))):
                files = [path for path in folder.rglob("*") if path.is_file()]
                chance.choice(DAMAGES)(files, chance)
            tally.count("damaged runs")
            before = _peak_kib()
            _look(folder, chance.choice((None, 0, 1)), truth, tally)
            grown += _peak_kib() - before
            assert grown < _MOST_KIB, f"reading took {grown >> 10} MiB more than any run before it"
            if number % exports == 0:
                _take_out(folder, root / "out", tally)
        tally["KiB of memory that reading them took"] = grown
    return tally


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _look(folder: Path, rank: int | None, truth: Truth, tally: Tally) -> None:
    intact_closing = _closing(folder, rank or 0) == _closing(folder.parent / "good", rank or 0)
    try:
        run = open_run(folder, rank=rank)
        refused = read_all(run, truth)
    except TorchtapError:
        tally.count("refused as a whole")
        return
    except _EarlierValue:
        # Only if the last attempt's records are gone and with them what it said at its end: then nobody can know.
        assert not intact_closing, "an earlier attempt's value was given for a step that a later one recorded"
        tally.count("the end of an attempt gone without a trace")
        return
    if refused:
        tally.count("some values refused")
    elif run.problems and len(run.problems) > 2:
        tally.count("read, with problems told")
    else:
        tally.count("read as it was")


def _closing(folder: Path, rank: int) -> bytes:
    path = folder / f"rank-{rank:05d}" / "attempt-0001" / "closed.json"
    return path.read_bytes() if path.is_file() else b""


def _take_out(folder: Path, out: Path, tally: Tally) -> None:
    from torchtap.sinks.export import FORMATS, export_run
    from torchtap.viewer.report import write_report
    from torchtap.viewer.run_index import Catalog, Refused
    from torchtap.viewer.server import answer, built

    out.mkdir(exist_ok=True)
    for form in FORMATS:
        try:
            export_run(open_run(folder), form, out / f"run.{form}")
        except TorchtapError:
            tally.count("exports refused")
        else:
            tally.count("exports written")
    try:
        catalog = Catalog.open([folder])
        for question in ("runs", "about", "findings", "coverage", "map"):
            answer(catalog, question, {"run": "", "statistic": "mean"})
            tally.count("questions of a page answered")
        if built():
            write_report([folder], out / "report.html")
            tally.count("reports written")
    except (TorchtapError, Refused):
        tally.count("pages refused")
