"""Run folders made by an enemy or eaten by a disk: an error or a partial read that says so, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.store.records import SITES, image, record
from tests.torture.crafting import forget_run_id

from torchtap.errors import RunCorruptError, RunError, RunFormatError, TorchtapError
from torchtap.store.files.layout import SegmentName
from torchtap.store.format.checksum import seal
from torchtap.store.format.segment import MAX_HEADER, parse_header, segment_note
from torchtap.store.read.reader import Run, open_run
from torchtap.store.write.writer import RunWriter

pytestmark = pytest.mark.usefixtures("a_file_for_each_flush")


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good run of three flushes; every test spoils it in its own way."""
    writer = RunWriter(tmp_path / "run", manifest={"sites": []})
    for step in range(3):
        writer.write(record(step, tensors=1))
        writer.event("tick", step=step)
        writer.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    writer.close()
    forget_run_id(tmp_path / "copy" / "rank-00000" / "attempt-0000")
    return tmp_path / "copy"


def files(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.rglob(f"{kind}-*"))


def read_everything(run: Run) -> None:
    (
        run.steps(),
        run.clock(),
        run.events(),
        run.coverage(),
        run.problems,
        run.table(),
        repr(run),
        run._repr_html_(),
    )
    for site in run.sites():
        for statistic in run.statistics(site):
            run.series(site, statistic)
    for ref in run.tensors():
        run.array(ref.site, ref.step, ref.field)


def test_a_truncated_segment_loses_only_itself(folder: Path) -> None:
    for kind in ("scalars", "tensors"):
        path = files(folder, kind)[1]
        path.write_bytes(path.read_bytes()[:-10])
    run = open_run(folder)
    assert run.steps().tolist() == [0, 2]
    assert [ref.step for ref in run.tensors()] == [0, 2]
    assert any("missing" in problem and "scalars" in problem for problem in run.problems)
    assert np.array_equal(run.array(SITES[0], 2), image(2))


def test_many_damaged_segments_lose_only_themselves(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", manifest={})
    for step in range(14):
        writer.write(record(step, tensors=1))
        writer.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    writer.close()
    for kind in ("scalars", "tensors"):
        for path in files(tmp_path / "copy", kind)[:12]:
            path.write_bytes(path.read_bytes()[:-10])
    run = open_run(tmp_path / "copy")
    assert run.steps().tolist() == [12, 13]
    assert [ref.step for ref in run.tensors()] == [12, 13]
    assert sum("scalars-" in problem for problem in run.problems) == 12


def test_an_empty_segment_loses_only_itself(folder: Path) -> None:
    files(folder, "scalars")[0].write_bytes(b"")
    run = open_run(folder)
    assert run.steps().tolist() == [1, 2]
    assert any("too few for a segment" in problem for problem in run.problems)


def test_a_removed_segment_is_noticed(folder: Path) -> None:
    files(folder, "scalars")[1].unlink()
    files(folder, "tensors")[0].unlink()
    run = open_run(folder)
    assert run.steps().tolist() == [0, 2]
    assert any("numbers of flushes 1 to 1 are missing" in problem for problem in run.problems)
    assert any("tensors of flushes 0 to 0 are missing" in problem for problem in run.problems)


def test_a_flipped_bit_in_a_tensor_is_an_error_and_not_a_wrong_value(folder: Path) -> None:
    path = files(folder, "tensors")[1]
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x10
    path.write_bytes(content)
    run = open_run(folder)
    with pytest.raises(RunCorruptError, match="checksum"):
        run.array(SITES[0], 1)
    with pytest.raises(RunCorruptError, match="checksum"):
        run.tensor(SITES[0], 1)
    assert np.array_equal(run.array(SITES[0], 0), image(0))


def test_a_flipped_bit_in_a_number_is_an_error_and_not_a_wrong_value(folder: Path) -> None:
    path = files(folder, "scalars")[1]
    content = bytearray(path.read_bytes())
    values = np.frombuffer(content, np.uint8)
    spot = bytes(content).find(np.float64(1.0).tobytes())  # the first site's mean at step 1
    assert spot > 0
    values[spot + 3] ^= 1
    path.write_bytes(values.tobytes())
    run = open_run(folder)
    with pytest.raises(RunCorruptError, match="checksum"):
        run.series(SITES[0], "mean")


@pytest.mark.parametrize("kind", ["scalars", "tensors"])
def test_any_flipped_bit_is_harmless_or_noticed(folder: Path, kind: str) -> None:
    path = files(folder, kind)[1]
    good = path.read_bytes()
    truth = [open_run(folder).series(site, "mean").values.tolist() for site in SITES]
    chance = np.random.default_rng(0)
    noticed = 0
    for spot in chance.integers(0, len(good), 150).tolist():
        content = bytearray(good)
        content[spot] ^= 1 << int(chance.integers(0, 8))
        path.write_bytes(content)
        try:
            run = open_run(folder)
            found = [run.series(site, "mean").values.tolist() for site in SITES]
            if 1 in run.steps().tolist() and any("tensors" in name for name in (kind,)):
                assert np.array_equal(run.array(SITES[0], 1), image(1))
            assert found == truth or run.problems
            noticed += bool([problem for problem in run.problems if path.name in problem])
        except TorchtapError:
            noticed += 1
    assert noticed > 50


def craft(head: object, data: bytes = b"") -> bytes:
    """A segment with this head, and with the checksum of it where there is room for one."""
    text = head if isinstance(head, bytes) else json.dumps(head, separators=(",", ":")).encode()
    with suppress(ValueError):
        text = seal(text)
    return len(text).to_bytes(8, "little") + text + data


NOTE = {"torchtap": segment_note(SegmentName("tensors", 1, 1, 1, 1), (0, 0))}

BAD_SEGMENTS: dict[str, bytes] = {
    "a head longer than any": (MAX_HEADER + 1).to_bytes(8, "little") + b"{}",
    "a head of 2**63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "a head longer than the file": (500).to_bytes(8, "little") + b"{}",
    "a head that is no JSON": craft(b"{"),
    "a head that is not text": craft(b"\xff\xfe\x00"),
    "a head nested too deep": craft(b"[" * 200_000),
    "a number with too many digits": craft(b'{"a":' + b"9" * 100_000 + b"}"),
    "a head that is a list": craft([1, 2]),
    "metadata that is a list": craft({"__metadata__": [1]}),
    "metadata of numbers": craft({"__metadata__": {"a": 1}}),
    "an entry that is text": craft({"__metadata__": NOTE, "0/full/value/x": "boo"}),
    "an unknown type": craft(
        {"0/full/value/x": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 1]}}, b"x"
    ),
    "bytes past the end": craft(
        {"0/full/value/x": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, b"x"
    ),
    "negative offsets": craft(
        {"0/full/value/x": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}, b"x"
    ),
    "offsets the wrong way round": craft({"x": {"dtype": "U8", "shape": [0], "data_offsets": [1, 0]}}, b"x"),
    "a shape that overflows": craft(
        {"0/full/value/x": {"dtype": "F64", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}
    ),
    "a negative shape": craft({"x": {"dtype": "U8", "shape": [-1, -1], "data_offsets": [0, 1]}}, b"x"),
    "a shape of booleans": craft({"x": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"x"),
    "a shape of fractions": craft({"x": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, b"x"),
    "overlapping entries": craft(
        {
            "0/full/value/x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
            "0/full/value/y": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
        },
        b"abc",
    ),
    "another kind than its name says": craft(
        {"__metadata__": {"torchtap": NOTE["torchtap"].replace("tensors", "x")}}
    ),
    "a newer format": craft({"__metadata__": {"torchtap": '{"format":99,"kind":"tensors"}'}}),
    "an entry that names no site": craft(
        {"__metadata__": NOTE, "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x"
    ),
    "no checksum": craft(
        {"__metadata__": NOTE, "1/full/value/x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x"
    ),
    "a bomb": craft(
        {
            "__metadata__": {
                **NOTE,
                "1/full/value/x": json.dumps(
                    {"codec": "zstd", "dtype": "float32", "stored_shape": [2**40], "crc32": "8cdc1683"}
                ),
            },
            "1/full/value/x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        },
        b"x",
    ),
}


@pytest.mark.parametrize("kind", ["scalars", "tensors"])
@pytest.mark.parametrize("what", BAD_SEGMENTS)
def test_a_crafted_segment_is_refused_and_the_rest_is_read(folder: Path, kind: str, what: str) -> None:
    files(folder, kind)[1].write_bytes(BAD_SEGMENTS[what])
    run = open_run(folder)
    refused = 0
    try:
        read_everything(run)
    except RunCorruptError:
        refused = 1
    assert refused or any(kind in problem for problem in run.problems)
    assert np.array_equal(run.array(SITES[0], 2), image(2))
    assert 2 in run.series(SITES[0], "mean").steps.tolist()


def test_a_grid_that_points_outside_the_clock_is_refused(folder: Path) -> None:
    path = files(folder, "scalars")[0]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    data = bytearray(content[8 + length :])
    start, stop = head["grid0.rows"]["data_offsets"]
    data[start:stop] = (10**9).to_bytes(8, "little")
    import zlib

    head["__metadata__"]["grid0.rows"] = json.dumps({"crc32": f"{zlib.crc32(data[start:stop]):08x}"})
    head["__metadata__"]["torchtap"] = segment_note(
        SegmentName("scalars", 0, 0, 0, 0), (0, 0), phases=["train"]
    )
    path.write_bytes(craft(head, bytes(data)))
    run = open_run(folder)
    assert any("not rows of the clock" in problem for problem in run.problems)
    assert run.steps().tolist() == [1, 2]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": {"name": "other", "version": 1}}', "[" * 100_000],
)
def test_a_spoiled_manifest_never_breaks_reading(folder: Path, text: str) -> None:
    (folder / "rank-00000" / "attempt-0000" / "manifest.json").write_text(text)
    try:
        run = open_run(folder)
    except RunFormatError:
        return
    assert run.problems
    read_everything(run)
    assert run.steps().tolist() == [0, 1, 2]


def test_a_newer_format_asks_for_a_newer_torchtap(folder: Path) -> None:
    path = folder / "rank-00000" / "attempt-0000" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["format"]["version"] = 99
    del manifest["check"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(RunFormatError, match="newer torchtap"):
        open_run(folder)


def test_strange_types_in_the_manifest_and_events_do_not_break_reading(folder: Path) -> None:
    part = folder / "rank-00000" / "attempt-0000"
    form = {"name": "torchtap-run", "version": 1}
    for sites in (7, "x", [1, None, {"name": 3}], {"a": 1}):
        (part / "manifest.json").write_text(json.dumps({"format": form, "sites": sites, "model": sites}))
        (part / "closed.json").write_text(json.dumps({"lost": sites}))
        files(folder, "events")[0].write_text('{"kind": 5}\n[]\n7\n')
        read_everything(open_run(folder))
    files(folder, "events")[0].write_text('{"kind":')
    assert any("events" in problem for problem in open_run(folder).problems)


def link_file(part: Path, secret: Path) -> None:
    path = next(part.glob("scalars-00000001*"))
    path.unlink()
    path.symlink_to(secret)


def link_part(part: Path, secret: Path) -> None:
    (part.parent / "attempt-0001").symlink_to(secret.parent / "secrets")


def link_rank(part: Path, secret: Path) -> None:
    (part.parent.parent / "rank-00001").symlink_to(secret.parent / "secrets" / "..")


def pipe(part: Path, secret: Path) -> None:
    path = next(part.glob("scalars-00000001*"))
    path.unlink()
    os.mkfifo(path)


def device(part: Path, secret: Path) -> None:
    path = next(part.glob("scalars-00000001*"))
    path.unlink()
    path.symlink_to("/dev/zero")


def a_folder(part: Path, secret: Path) -> None:
    path = next(part.glob("scalars-00000001*"))
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("plant", [link_file, link_part, link_rank, pipe, device, a_folder])
def test_nothing_outside_the_folder_is_read_and_nothing_blocks(
    folder: Path, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    part = folder / "rank-00000" / "attempt-0000"
    secrets = tmp_path / "secrets"
    shutil.copytree(part, secrets)  # a perfectly good part, but somewhere else
    with RunWriter(tmp_path / "other", manifest={}) as writer:
        writer.write(record(99))
    secret = next((tmp_path / "other").rglob("scalars-*"))
    plant(part, secret)
    run = open_run(folder)
    assert 99 not in run.steps().tolist()
    assert {0, 2} <= set(run.steps().tolist())
    read_everything(run)
    if 1 in run.ranks:
        with pytest.raises((RunError, OSError)):
            run.rank(1)


def test_names_with_path_components_are_only_names(tmp_path: Path) -> None:
    evil = ("../../../etc/passwd:output", "/etc/passwd:output", "a\x00b:output")
    from torchtap.store.record import ScalarBlock, StepRecord, TensorItem

    items = tuple(TensorItem(site, "../value", "../../full", np.ones(2)) for site in evil)  # type: ignore[arg-type]
    block = ScalarBlock(evil, ("../mean",), np.ones((3, 1)))
    with RunWriter(tmp_path / "run", manifest={}) as writer:
        writer.write(StepRecord(0, None, None, "train", 0.0, (block,), items))
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    run = open_run(tmp_path / "run")
    assert set(run.sites()) == set(evil)
    for site in evil:
        assert run.array(site, field="../value").tolist() == [1, 1]
        assert run.series(site, "../mean").values.tolist() == [1]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1) | st.integers(0, 300))
def test_any_bytes_as_a_head_are_parsed_or_refused(content: bytes, length: int) -> None:
    whole = length.to_bytes(8, "little") + content
    with suppress(RunCorruptError):
        parse_header(lambda offset, size: whole[offset : offset + size], len(whole))
