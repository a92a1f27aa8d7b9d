"""Format 2 notices what format 1 could not: damage to names and notes, files that were renamed. Format 1 is read."""

from __future__ import annotations

import json
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.store.records import SITES, STATISTICS, image, number, record

from torchtap.errors import TorchtapError
from torchtap.store.files.layout import SegmentName, parse_segment
from torchtap.store.format.checksum import is_sealed, seal
from torchtap.store.read.reader import Run, open_run
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

pytestmark = pytest.mark.usefixtures("a_file_for_each_flush")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = RunWriter(tmp_path / "run", manifest={"sites": [{"name": SITES[0], "class": "Linear"}]})
    for step in range(4):
        writer.write(record(step, tensors=1))
        writer.event("tick", step=step)
        writer.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    writer.close()
    return tmp_path / "copy"


def part_of(folder: Path) -> Path:
    return folder / "rank-00000" / "attempt-0000"


def test_a_run_of_the_first_format_is_read_whole(tmp_path: Path) -> None:
    with zipfile.ZipFile(Path(__file__).parent / "data" / "format-1.zip") as archive:
        archive.extractall(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.problems == []
    assert run.closed
    assert run.manifest["format"]["version"] == 1
    assert run.steps().tolist() == list(range(9))
    table = run.table()
    rows = zip(table["step"], table["site"], table["statistic"], table["value"], strict=True)
    found = {(int(step), str(site), str(statistic)): float(value) for step, site, statistic, value in rows}
    assert found == {
        (step, name, statistic): number(step, site, kind)
        for step in range(9)
        for site, name in enumerate(SITES)
        for kind, statistic in enumerate(STATISTICS)
    }
    refs = {(ref.site, ref.step, ref.dtype) for ref in run.tensors()}
    assert {("zeros:output", 5, "float32"), ("half:output", 5, "bfloat16")} <= refs
    assert torch.equal(run.tensor("sparse:output", 5).to_dense(), torch.eye(3))
    assert np.array_equal(run.array(SITES[0], 3), image(3))
    assert [event["text"] for event in run.events("warning")] == ["attempt 0", "attempt 1"]


def truth_of(folder: Path) -> dict[str, object]:
    """Everything a run says, by name."""
    return all_of(open_run(folder))


def all_of(run: Run) -> dict[str, object]:
    said: dict[str, object] = {"sites": run.sites(), "steps": run.steps().tolist(), "manifest": run.manifest}
    said["clock"] = run.clock().tolist()
    said["events"] = run.events("tick")
    for site in run.sites():
        for statistic in run.statistics(site):
            said[f"{site} {statistic}"] = [column.tolist() for column in run.series(site, statistic)]
    for ref in run.tensors():
        said[str(ref)] = run.array(ref.site, ref.step, ref.field).tolist()
    return said


@pytest.mark.parametrize("kind", ["scalars", "tensors", "manifest", "events"])
def test_no_flipped_bit_gives_a_right_number_under_a_changed_name(folder: Path, kind: str) -> None:
    truth = truth_of(folder)
    path = sorted(part_of(folder).glob(f"{kind}*"))[0]
    good = path.read_bytes()
    chance = np.random.default_rng(3)
    head = 8 + int.from_bytes(good[:8], "little") if kind in ("scalars", "tensors") else len(good)
    told = 0
    for spot in chance.integers(0, head, 80).tolist():
        content = bytearray(good)
        content[spot] ^= 1 << int(chance.integers(0, 8))
        path.write_bytes(content)
        try:
            run = open_run(folder)
            said, problems = all_of(run), run.problems
        except TorchtapError:
            told += 1
            continue
        assert any(path.name in problem for problem in problems), f"bit flip at {spot} is told nowhere"
        told += 1
        known = {
            name: value
            for name, value in said.items()
            if name not in ("steps", "clock", "manifest", "events")
        }
        for name, value in known.items():
            if name == "sites":
                assert set(value) <= set(truth["sites"])  # type: ignore[call-overload]
            else:
                assert name in truth, "a name that nobody recorded"
    assert told == 80


def rename(part: Path, kind: str, at: int, to: SegmentName) -> None:
    path = sorted(part.glob(f"{kind}-*"))[at]
    path.rename(part / to.file)


@pytest.mark.parametrize("kind", ["scalars", "tensors"])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize(
    "flushes", [(0, 99_999_999), (0, 3), (5000, 5000), (5000, 99_999_999), (2, 2), (1, 7)]
)
def test_a_renamed_segment_hides_nothing_and_loses_nothing(
    folder: Path, kind: str, at: int, flushes: tuple[int, int]
) -> None:
    truth = truth_of(folder)
    part = part_of(folder)
    own = parse_segment(sorted(part.glob(f"{kind}-*"))[at].name)
    assert own is not None
    to = SegmentName(own.kind, *flushes, own.low, own.high)
    if (part / to.file).exists():
        pytest.skip("it is called so")
    rename(part, kind, at, to)
    run = open_run(folder)
    assert truth_of(folder) == truth
    run.tensors()
    assert any("renamed" in problem for problem in run.problems)


def test_a_copy_of_a_segment_under_another_name_counts_once(folder: Path) -> None:
    truth = truth_of(folder)
    part = part_of(folder)
    for kind in ("scalars", "tensors"):
        path = sorted(part.glob(f"{kind}-*"))[1]
        shutil.copy(path, part / SegmentName(kind, 9, 12, 1, 1).file)  # type: ignore[arg-type]
    assert truth_of(folder) == truth


def test_a_renamed_segment_of_the_first_format_hides_nothing(tmp_path: Path) -> None:
    with zipfile.ZipFile(Path(__file__).parent / "data" / "format-1.zip") as archive:
        archive.extractall(tmp_path / "run")
    part = tmp_path / "run" / "rank-00000" / "attempt-0001"
    for kind in ("scalars", "tensors"):
        path = next(part.glob(f"{kind}-*"))
        shutil.copy(path, part / path.name.replace("-00000004_", "-99999999_"))
    run = open_run(tmp_path / "run")
    assert run.steps().tolist() == list(range(9))
    assert np.array_equal(run.array(SITES[0], 7), image(7))


def test_a_head_that_has_lost_its_checksum_is_refused(folder: Path) -> None:
    path = sorted(part_of(folder).glob("scalars-*"))[0]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    note = json.loads(head["__metadata__"]["torchtap"])
    for without in ({"check"}, {"check", "flushes", "steps"}):
        changed = {key: value for key, value in note.items() if key not in without} | {
            "format": 3 - len(without) // 2
        }
        head["__metadata__"]["torchtap"] = json.dumps(changed)
        text = json.dumps(head).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        run = open_run(folder)
        assert 0 not in run.steps().tolist()
        assert any(path.name in problem for problem in run.problems)


def test_a_text_is_sealed_and_any_change_of_it_is_seen() -> None:
    text = seal(b'{"check":"00000000","kind":"x"}')
    assert is_sealed(text)
    assert not is_sealed(b'{"kind":"x"}')
    for at in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[at] ^= 1 << bit
            with suppress(TorchtapError):
                assert not is_sealed(bytes(changed))
    with pytest.raises(ValueError, match="no room"):
        seal(b'{"kind":"x"}')


@pytest.mark.parametrize("kind", ["scalars", "tensors"])
@pytest.mark.parametrize("source", ["rank-00001/attempt-0001", "rank-00000/attempt-0000"])
@pytest.mark.parametrize("keeps_name", [True, False])
def test_a_file_of_another_rank_or_attempt_is_never_taken_for_ones_own(
    tmp_path: Path, kind: str, source: str, keeps_name: bool
) -> None:
    """Somebody sorts files by hand, or copies two parts into one folder."""
    for rank in (0, 1):
        for _ in range(2):
            with RunWriter(tmp_path / "run", manifest={}, rank=rank, world=2) as writer:
                writer.write(record(4, tensors=1))
    stranger = next((tmp_path / "run" / source).glob(f"{kind}-*"))
    own = next((tmp_path / "run" / "rank-00000" / "attempt-0001").glob(f"{kind}-*"))
    content = stranger.read_bytes()
    stranger.unlink()
    own.unlink() if not keeps_name else None
    (own if keeps_name else own.with_name(stranger.name)).write_bytes(content)
    run = open_run(tmp_path / "run", rank=0)  # another rank may still hold what this one has lost
    assert not list(run.tensors()) or kind == "scalars"
    assert any("moved here" in problem for problem in run.problems), run.problems
    if kind == "scalars":
        with pytest.raises(TorchtapError):
            run.series(SITES[0], "mean")


@pytest.mark.parametrize("file", ["manifest.json", "closed.json"])
def test_a_document_of_another_attempt_is_told(tmp_path: Path, file: str) -> None:
    for labels in ("first", "second"):
        with RunWriter(tmp_path / "run", manifest={"labels": labels}) as writer:
            writer.write(record(4))
    part = tmp_path / "run" / "rank-00000"
    shutil.copy(part / "attempt-0000" / file, part / "attempt-0001" / file)
    run = open_run(tmp_path / "run", attempt=1)
    assert any(file in problem and "attempt 0" in problem for problem in run.problems)
    assert run.manifest.get("labels") != "first"
    assert run.series(SITES[0], "mean").values.tolist() == [number(4, 0, 0)]


@pytest.mark.parametrize("damage", [b"", b"{", None])
def test_a_damaged_manifest_does_not_put_an_attempt_before_those_that_it_followed(
    tmp_path: Path, damage: bytes | None
) -> None:
    for shift in (0, 100):
        for rank in (0, 1):
            with RunWriter(tmp_path / "run", manifest={}, rank=rank, world=2) as writer:
                block = ScalarBlock(SITES, STATISTICS, np.full((3, 3), shift + 4.0))
                writer.write(StepRecord(4, None, None, "train", 1.0, (block,), ()))
    for path in (tmp_path / "run").glob("rank-*/attempt-0001/*.json"):
        if path.name != "closed.json":
            content = path.read_bytes()
            flipped = content.replace(b'"created": "2', b'"created": "1')  # a thousand years earlier
            path.write_bytes(flipped if damage is None else damage)
    assert open_run(tmp_path / "run").series(SITES[0], "mean").values.tolist() == [104.0]
