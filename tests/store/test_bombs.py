"""Small files that would take much: memory stays near what was asked for, time near the number of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.optional import need
from tests.store.records import record
from tests.torture.crafting import crafted, scalar_segment, tensor_segment, write_segment

from torchtap.errors import RunCorruptError, RunError, TorchtapError
from torchtap.store.files.layout import SegmentName
from torchtap.store.format.checksum import JSON_LIMIT, load_json, seal
from torchtap.store.read.reader import open_run
from torchtap.store.write.writer import RunWriter

MiB = 1 << 20

MEASURE = """
import sys
import numpy as np
from torchtap.errors import TorchtapError
from torchtap.store.read.reader import open_run
import torchtap.store.format.payload, zlib, json
try: import zstandard
except ImportError: pass
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
open("/proc/self/clear_refs", "w").write("5")
before, result = peak(), "read"
run = None
try:
    run = open_run(sys.argv[1])
    exec(sys.argv[2])
except TorchtapError as error:
    result = type(error).__name__
print(peak() - before, result)
"""


def peak_of(folder: Path, ask: str = "") -> tuple[int, str]:
    """How much memory opening a run and asking something of it takes at most, and how it ended."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), ask],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    memory, result = done.stdout.split()
    return int(memory), result


@pytest.fixture
def part(tmp_path: Path) -> Path:
    with RunWriter(tmp_path / "run", manifest={}) as writer:
        writer.write(record(0, tensors=1))
    return tmp_path / "run" / "rank-00000" / "attempt-0000"


def scalars(first: int, last: int | None = None, steps: tuple[int, int] = (1, 1)) -> SegmentName:
    return SegmentName("scalars", first, first if last is None else last, *steps)


def tensors(first: int, step: int = 0) -> SegmentName:
    return SegmentName("tensors", first, first, step, step)


def test_a_long_name_of_a_phase_takes_no_memory_for_every_row(part: Path) -> None:
    name = scalars(1, steps=(1, 200))
    content = scalar_segment(name, list(range(1, 201)), ["x"], phases=("p" * 500_000,))
    write_segment(part, name, content)
    memory, result = peak_of(part.parents[1], "run.clock(); run.series('x', 'mean')")
    assert memory < 64 * MiB, (memory / MiB, result)


def empty_files(part: Path, count: int) -> None:
    for number in range(1, count + 1):
        (part / scalars(number).file).write_bytes(b"")


def empty_files_one_behind_the_other(part: Path, count: int) -> None:
    for number in range(1, count + 1):
        (part / scalars(1, number).file).write_bytes(b"")


def empty_tensors_one_behind_the_other(part: Path, count: int) -> None:
    for number in range(1, count + 1):
        (part / SegmentName("tensors", 1, number, 0, number).file).write_bytes(b"")


def renamed_files_one_behind_the_other(part: Path, count: int) -> None:
    content = scalar_segment(scalars(1), [1], ["x"])
    for number in range(1, count + 1):
        (part / scalars(1, number + 1).file).write_bytes(content)


def every_second_flush(part: Path, count: int) -> None:
    for number in range(1, count + 1):
        name = scalars(2 * number, steps=(number, number))
        write_segment(part, name, scalar_segment(name, [number], ["x"]) if number % 2 else b"")


def empty_events(part: Path, count: int) -> None:
    for number in range(1, count + 1):
        (part / SegmentName("events", number, number).file).write_bytes(b"")


def many_sites(part: Path, count: int) -> None:
    for number in range(1, count + 1):
        name = scalars(number, steps=(number, number))
        write_segment(part, name, scalar_segment(name, [number], [f"site {number}"]))


@pytest.mark.parametrize(
    "plant",
    [
        empty_files,
        empty_files_one_behind_the_other,
        empty_tensors_one_behind_the_other,
        renamed_files_one_behind_the_other,
        every_second_flush,
        empty_events,
        many_sites,
    ],
)
def test_opening_asks_each_file_once(
    part: Path, plant: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtap.store.files import folder as files

    plant(part, 400)
    opened = 0
    open_one = files.LocalFolder.open

    def counting(self: files.LocalFolder, name: str) -> files.LocalFile:
        nonlocal opened
        opened += 1
        return open_one(self, name)

    monkeypatch.setattr(files.LocalFolder, "open", counting)
    run = open_run(part.parents[1])
    assert opened < 12 * 400, opened  # a good one is opened for every column of its clock
    assert 0 in run.steps().tolist()
    assert run.series("encoder:output", "mean").values[0] == 0.0


def test_a_file_of_holes_is_refused_before_it_is_read(part: Path) -> None:
    name = scalars(1)
    path = write_segment(part, name, scalar_segment(name, [1], ["x"]))
    os.truncate(path, 6 << 30)
    memory, _ = peak_of(part.parents[1], "run.table()")
    assert memory < 64 * MiB
    assert any("holes" in problem for problem in open_run(part.parents[1]).problems)


def test_a_large_tensor_with_a_wrong_checksum_is_refused_before_memory_is_taken_for_it(part: Path) -> None:
    size = 512 * MiB
    name = tensors(1)
    head = json.loads(tensor_segment(name, "x", np.zeros(1, "<f4"))[8:].rstrip(b"\0").decode())
    key = "0/full/value/x"
    head[key] |= {"shape": [size // 4], "data_offsets": [0, size]}
    head["__metadata__"]["torchtap"] = crafted_note(name)
    text = seal(json.dumps(head, separators=(",", ":")).encode())
    path = part / name.file
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size)
    memory, result = peak_of(part.parents[1], "run.array('x', 0)")
    assert result == "RunCorruptError"
    assert memory < 64 * MiB


def crafted_note(name: SegmentName) -> str:
    from torchtap.store.format.segment import segment_note

    return segment_note(name, (0, 0))


@pytest.mark.parametrize("text", ["{},", "[],", '{"a":1},', "1,", '"ab",', "[[]],", "1.5,", '{"a":{}},'])
def test_json_that_would_swell_is_refused_or_stays_small(part: Path, text: str) -> None:
    start = '{"check": "00000000", "format": {"name": "torchtap-run", "version": 2}, "x": ['
    whole = f"{start}{text * (34 * MiB // len(text))}0]}}"
    (part / "manifest.json").write_bytes(seal(whole.encode()))
    memory, _ = peak_of(part.parents[1])
    assert memory < 64 * MiB  # nobody has asked for the manifest yet
    memory, _ = peak_of(part.parents[1], "run.manifest; run.problems")
    assert memory < 64 * MiB + 5 * len(whole)


def test_a_huge_json_file_is_refused_by_its_size(part: Path) -> None:
    os.truncate(part / "manifest.json", JSON_LIMIT + 1)
    memory, _ = peak_of(part.parents[1], "run.manifest")
    assert memory < 64 * MiB
    with pytest.raises(RunCorruptError, match="at most"):
        load_json(" " * (JSON_LIMIT + 1))


def packed(size: int) -> bytes:
    zstandard = need("zstandard")
    made = zstandard.ZstdCompressor(level=1, write_content_size=True).compressobj(size=size)
    zeros = bytes(MiB)
    return b"".join([*(made.compress(zeros) for _ in range(size // MiB)), made.flush()])


def plant_packed(part: Path, size: int, shape: list[int]) -> None:
    name = tensors(1)
    stored = np.frombuffer(packed(size), np.uint8)
    write_segment(
        part, name, tensor_segment(name, "x", stored, codec="zstd", dtype="float32", stored_shape=shape)
    )


def test_a_frame_that_says_another_size_than_the_shape_is_refused_at_once(part: Path) -> None:
    plant_packed(part, 256 * MiB, [4])
    memory, result = peak_of(part.parents[1], "run.array('x', 0)")
    assert result == "RunCorruptError"
    assert memory < 64 * MiB


def test_unpacking_takes_little_more_than_the_tensor(part: Path) -> None:
    plant_packed(part, 256 * MiB, [64 * MiB])
    memory, result = peak_of(part.parents[1], "assert run.array('x', 0).nbytes == 256 << 20")
    assert result == "read"
    assert memory < (256 + 64) * MiB


def test_the_page_looks_at_the_size_that_a_tensor_unpacks_to(part: Path) -> None:
    from torchtap.viewer.run_index import Catalog, Refused
    from torchtap.viewer.server import answer

    plant_packed(part, 512 * MiB, [128 * MiB])
    catalog = Catalog.open([part.parents[1]])
    with pytest.raises(Refused, match="too many to show"):
        answer(catalog, "slice", {"run": "", "site": "x", "step": "0"})


@pytest.mark.parametrize("shape", [[2**40], [2**20, 2**20], [2**31, 2, 2]])
def test_a_noted_shape_beyond_all_memory_is_an_error_of_torchtap(part: Path, shape: list[int]) -> None:
    name = tensors(1)
    values, places = np.zeros(1, "<f4"), np.zeros((len(shape), 1), "<i8")
    keys = "0/full/value/x", "0/full/value@indices/x"
    notes = {keys[0]: {"layout": "sparse_coo", "shape": shape}}
    write_segment(part, name, crafted(name, {keys[1]: places, keys[0]: values}, notes))
    run = open_run(part.parents[1])
    assert run.tensors("x")[0].unpacked > 2**34
    try:
        found = run.array("x", 0)
    except RunError:
        pass
    else:  # pages of zeros that nobody has touched take no memory
        assert found.shape == tuple(shape)


@pytest.mark.parametrize(
    "note", [{"stored_shape": [-1]}, {"stored_shape": "x"}, {"stored_shape": [2**60]}, {}]
)
def test_a_packed_tensor_that_says_no_shape_is_refused(part: Path, note: dict[str, object]) -> None:
    name = tensors(1)
    write_segment(
        part, name, tensor_segment(name, "x", np.zeros(9, np.uint8), codec="zstd", dtype="float32", **note)
    )
    run = open_run(part.parents[1])
    with pytest.raises(TorchtapError):
        run.array("x", 0)
