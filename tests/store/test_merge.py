"""Many small segments become few, and nobody notices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.store.records import SITES, STATISTICS, grid, image, number, record

from torchtap.store.files.folder import LocalDestination
from torchtap.store.files.layout import SegmentName, parse_segment, widest
from torchtap.store.read.reader import open_run
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem
from torchtap.store.write.segments import EventLines, Segments
from torchtap.store.write.writer import RunWriter


def parts(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.rglob(f"{kind}-*"))


def test_ten_thousand_flushed_steps_leave_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    with RunWriter(tmp_path, manifest={}) as writer:
        for step in range(10_000):
            writer.write(record(step))
            if step % 4 == 0:
                writer.flush()
    run = open_run(tmp_path)
    for site, name in enumerate(SITES):
        steps, values = run.series(name, "std")
        assert steps.tolist() == list(range(10_000))
        assert values.tolist() == [number(step, site, 1) for step in range(10_000)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"10,000 steps of 9 numbers: {len(files)} files, {size} bytes")
    assert len(files) < 20
    assert size < 2 * 10_000 * (9 * 8 + 41)
    assert run.problems == []


def test_merging_keeps_tensors_events_masks_and_phases(tmp_path: Path) -> None:
    sites, statistics = ("a:output", "b:output"), ("mean",)
    sparse = torch.eye(3).to_sparse()
    with RunWriter(tmp_path, manifest={}) as writer:
        for step in range(40):
            here = np.array([step % 3 != 0, True]) if step % 2 else None
            blocks = [ScalarBlock(sites, statistics, np.array([[step], [-step]], float), here)]
            if step % 4 == 0:
                blocks.append(ScalarBlock(SITES, STATISTICS, grid(step)))
            items = (
                TensorItem("a:output", "value", "full", torch.full((2, step), float(step))),
                TensorItem("b:output", "value", "full", sparse * step),
            )
            phase = "eval" if step >= 30 else "train"
            writer.write(StepRecord(step, None, step, phase, float(step), tuple(blocks), items))
            writer.event("tick", step=step)
            writer.flush()
    assert (
        len(parts(tmp_path, "scalars"))
        == len(parts(tmp_path, "tensors"))
        == len(parts(tmp_path, "events"))
        == 1
    )
    run = open_run(tmp_path)
    assert run.problems == []
    absent = {step for step in range(40) if step % 2 and step % 3 == 0}
    in_phases = {"train": range(30), "eval": range(30, 40)}
    for phase, steps in in_phases.items():
        assert set(run.series("a:output", "mean", phase).steps.tolist()) == set(steps) - absent
        assert run.series("b:output", "mean", phase).values.tolist() == [-step for step in steps]
        found = run.series(SITES[1], "max", phase)
        assert found.steps.tolist() == [step for step in steps if step % 4 == 0]
        assert found.values.tolist() == [number(step, 1, 2) for step in found.steps.tolist()]
    assert run.clock().phase.tolist() == ["train"] * 30 + ["eval"] * 10
    assert [event["step"] for event in run.events("tick")] == list(range(40))
    for step in (0, 1, 39):
        assert torch.equal(run.tensor("a:output", step), torch.full((2, step), float(step)))
        assert torch.equal(run.tensor("b:output", step).to_dense(), torch.eye(3) * step)


def test_the_same_tensor_twice_in_a_step_is_kept_twice_by_a_merge(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={}) as writer:
        for _ in range(2):
            writer.write(record(5, tensors=1))
            writer.flush()
    assert len(parts(tmp_path, "tensors")) == 1
    assert len(open_run(tmp_path).tensors()) == 2


def test_a_crash_between_merging_and_removing_shows_every_step_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, manifest={})
    for step in range(5):
        writer.write(record(step, tensors=1))
        writer.flush()
    part = tmp_path / "rank-00000" / "attempt-0000"
    kept = {path.name: path.read_bytes() for path in part.iterdir() if parse_segment(path.name)}
    writer.close()
    assert len(parts(tmp_path, "scalars")) == 1
    for name, content in kept.items():
        (part / name).write_bytes(content)
    run = open_run(tmp_path)
    assert run.series(SITES[0], "mean").steps.tolist() == list(range(5))
    assert len(run.tensors()) == 5
    assert run.problems == []


def test_a_damaged_merged_segment_gives_way_to_its_sources(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, manifest={})
    for step in range(5):
        writer.write(record(step))
        writer.flush()
    part = tmp_path / "rank-00000" / "attempt-0000"
    kept = {path.name: path.read_bytes() for path in parts(tmp_path, "scalars")}
    writer.close()
    merged = parts(tmp_path, "scalars")[0]
    merged.write_bytes(merged.read_bytes()[:100])
    for name, content in kept.items():
        (part / name).write_bytes(content)
    run = open_run(tmp_path)
    assert run.series(SITES[0], "mean").steps.tolist() == list(range(5))
    assert any(merged.name in problem for problem in run.problems)


def test_a_file_that_is_damaged_while_it_is_small_is_written_again_from_memory(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, manifest={})
    for step in range(3):
        writer.write(record(step, tensors=1))
        writer.flush()
    for kind in ("scalars", "tensors"):
        path = parts(tmp_path, kind)[0]
        content = bytearray(path.read_bytes())
        content[-30] ^= 1
        path.write_bytes(content)
    writer.close()
    run = open_run(tmp_path)
    assert run.problems == []
    assert np.array_equal(run.array(SITES[0], 0), image(0))
    assert run.series(SITES[0], "std").values.tolist() == [number(step, 0, 1) for step in range(3)]


def test_a_disk_without_room_for_a_wider_file_takes_the_new_records_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalDestination.put

    def full(place: LocalDestination, name: str, buffers: list[bytes], replaces: Sequence[str] = ()) -> None:
        if replaces:
            raise OSError(28, "No space left on device")
        put(place, name, buffers)

    monkeypatch.setattr(LocalDestination, "put", full)
    writer = RunWriter(tmp_path, manifest={})
    for step in range(3):
        writer.write(record(step, tensors=1))
        writer.flush()
    writer.close()
    assert writer.lost == []
    assert np.array_equal(open_run(tmp_path).array(SITES[0], 1), image(1))
    assert len(parts(tmp_path, "scalars")) == 3


def test_many_flushes_leave_a_few_files_that_halve_in_size(tmp_path: Path) -> None:
    place = LocalDestination(str(tmp_path), 0)
    lines = EventLines()
    segments = Segments(place, lines)
    most = 0
    for _ in range(300):
        lines.append(b"{}")
        segments.flush()
        most = max(most, len(parts(tmp_path, "events")))
    place.release()
    named = sorted(
        name for path in parts(tmp_path, "events") if (name := parse_segment(path.name)) is not None
    )
    assert [(name.first, name.last) for name in named] == [(0, 255), (256, 287), (288, 295), (296, 299)]
    assert most <= 9


def test_of_overlapping_segments_the_widest_count() -> None:
    def named(first: int, last: int) -> SegmentName:
        return SegmentName("events", first, last)

    kept, gaps = widest([named(0, 0), named(0, 3), named(1, 1), named(4, 4), named(7, 8), named(7, 7)])
    assert kept == [named(0, 3), named(4, 4), named(7, 8)]
    assert gaps == [(5, 6)]
