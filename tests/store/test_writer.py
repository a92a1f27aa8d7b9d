"""What the writer does when things go wrong: the training goes on, and the run says what was lost."""

from __future__ import annotations

import os
import pickle
import threading
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.store.records import SITES, image, number, record

from torchtap.errors import RecordingLostError, SessionError
from torchtap.store.files.folder import LocalDestination
from torchtap.store.read.reader import open_run
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem
from torchtap.store.write import writer as recorder
from torchtap.store.write.queue import Barrier, RecordQueue
from torchtap.store.write.writer import RunWriter


def test_flush_makes_everything_visible(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={}) as writer:
        writer.write(record(0, tensors=1))
        writer.flush()
        run = open_run(tmp_path)
        assert run.steps().tolist() == [0]
        assert np.array_equal(run.array(SITES[0], 0), image(0))
        assert run.status == "recording"
    assert open_run(tmp_path).status == "closed"


def test_flush_syncs_every_file_and_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    writer = RunWriter(tmp_path, manifest={})
    writer.write(record(0, tensors=1))
    writer.event("warning", text="x")
    writer.flush()
    part = tmp_path / "rank-00000" / "attempt-0000"
    names = {path.name for path in part.iterdir()} - {"writer.lock"}
    assert {os.path.basename(path) for path in synced} >= names | {part.name, part.parent.name}
    writer.close()


def test_a_tensor_that_is_written_in_pieces_comes_back_verified(tmp_path: Path) -> None:
    values = [np.random.default_rng(step).bytes((9 << 20) + step) for step in range(3)]
    with RunWriter(tmp_path, manifest={}) as writer:
        for step, value in enumerate(values):
            item = TensorItem("a:output", "value", "full", np.frombuffer(value, np.uint8))  # type: ignore[arg-type]
            writer.write(StepRecord(step, None, None, "train", 0.0, (), (item,)))
    run = open_run(tmp_path)
    assert [run.array("a:output", step).tobytes() for step in range(3)] == values


def test_numbers_become_visible_without_a_flush(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={}, flush_seconds=0.01) as writer:
        writer.write(record(0))
        deadline = time.monotonic() + 30
        while not len(open_run(tmp_path).steps()):
            assert time.monotonic() < deadline, "never became visible"


def test_write_after_close_is_refused_and_closing_twice_is_not(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, manifest={})
    writer.close()
    writer.close()
    writer.flush()
    with pytest.raises(SessionError, match="is closed"):
        writer.write(record(0))


def test_the_manifest_can_be_completed_while_recording(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={"plan": {"taps": 1}}) as writer:
        writer.update_manifest(sites=[{"name": SITES[1]}], format="nonsense")
        writer.flush()
        manifest = open_run(tmp_path).manifest
    assert manifest["sites"] == [{"name": SITES[1]}]
    assert manifest["plan"] == {"taps": 1}
    assert manifest["format"] == {"name": "torchtap-run", "version": 2}


def test_the_same_folder_again_is_a_further_attempt(tmp_path: Path) -> None:
    for attempt, steps in enumerate([range(10), range(6, 12)]):
        with RunWriter(tmp_path, manifest={"try": attempt}) as writer:
            assert writer.attempt == attempt
            for step in steps:
                writer.write(record(step, tensors=1, time=float(attempt)))
    run = open_run(tmp_path)
    assert run.attempts == [0, 1]
    assert run.manifest["try"] == 1
    clock = run.clock()
    assert clock.step.tolist() == list(range(12))
    assert clock.time.tolist() == [0.0] * 6 + [1.0] * 6, "the later attempt's steps count"
    assert run.series(SITES[0], "mean").values.tolist() == [number(step, 0, 0) for step in range(12)]
    assert [ref.step for ref in run.tensors()] == list(range(12))
    assert np.array_equal(run.array(SITES[0], 2), image(2))
    assert open_run(tmp_path, attempt=0).steps().tolist() == list(range(10))


def test_an_attempt_that_died_early_hides_only_the_steps_it_recorded(tmp_path: Path) -> None:
    for attempt, steps in enumerate([range(10), range(3)]):
        with RunWriter(tmp_path, manifest={}) as writer:
            for step in steps:
                writer.write(record(step, time=float(attempt)))
    clock = open_run(tmp_path).clock()
    assert clock.step.tolist() == list(range(10))
    assert clock.time.tolist() == [1.0] * 3 + [0.0] * 7


def test_a_restart_by_the_launcher_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with RunWriter(tmp_path, manifest={}):
        pass
    launch = open_run(tmp_path).manifest["launch"]
    assert (launch["run_id"], launch["restart"]) == ("job7", 2)


def test_writers_that_begin_at_once_get_an_attempt_each(tmp_path: Path) -> None:
    places: list[LocalDestination] = []
    threads = [
        threading.Thread(target=lambda: places.append(LocalDestination(str(tmp_path), 0))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(place.part[1] for place in places) == list(range(8))
    assert len({place.run_id for place in places}) == 8
    for place in places:
        place.release()


def test_a_second_writer_of_a_rank_in_one_folder_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    first = RunWriter(tmp_path, manifest={})
    with pytest.raises(SessionError, match="already records rank 0"):
        RunWriter(f"{tmp_path}/./", manifest={})
    with RunWriter(tmp_path, manifest={}, rank=1, world=2):
        pass
    first.close()
    with RunWriter(tmp_path, manifest={}) as again:
        assert again.attempt == 1


def test_a_relative_folder_and_a_later_change_of_directory_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = RunWriter("run", manifest={})
    writer.write(record(0, tensors=1))
    writer.flush()
    reader = open_run("run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    for step in range(1, 4):
        writer.write(record(step, tensors=1))
        writer.flush()
    writer.close()
    assert writer.lost == []
    assert list((tmp_path / "elsewhere").iterdir()) == []
    reader.refresh()
    for run in (reader, reader.rank(0), open_run(tmp_path / "run"), pickle.loads(pickle.dumps(reader))):
        assert run.steps().tolist() == [0, 1, 2, 3]
        assert run.problems == []


def test_a_rank_folder_that_is_a_link_is_refused_and_nothing_is_written_through_it(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank-00000").symlink_to(tmp_path / "outside")
    with pytest.warns(RuntimeWarning, match="link"):
        writer = RunWriter(tmp_path / "run", manifest={})
    writer.write(record(0))
    writer.close()
    assert writer.lost
    assert list((tmp_path / "outside").iterdir()) == []


# --- a failing disk -----------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While set, every write to disk fails as on a full one."""
    full = threading.Event()
    original = LocalDestination.put

    def put(*arguments: Any) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        original(*arguments)

    monkeypatch.setattr(LocalDestination, "put", put)
    return full


def test_a_full_disk_loses_tensors_keeps_numbers_for_later_and_says_so(
    tmp_path: Path, full_disk: threading.Event
) -> None:
    with (
        pytest.warns(RuntimeWarning, match="No space left") as caught,
        RunWriter(tmp_path, manifest={}) as writer,
    ):
        writer.write(record(0, tensors=1))
        writer.flush()
        full_disk.set()
        writer.write(record(1, tensors=2))
        writer.flush()
        writer.write(record(2, tensors=1))
        writer.flush()
        full_disk.clear()
        writer.write(record(3, tensors=1))
    assert len(caught) == 1, "the warning comes once"
    assert any("3 tensors lost: No space left" in sentence for sentence in writer.lost)
    run = open_run(tmp_path)
    assert run.series(SITES[0], "mean").steps.tolist() == [0, 1, 2, 3]
    assert [ref.step for ref in run.tensors()] == [0, 3]
    assert sum(event["tensors"] for event in run.events("lost")) == 3
    assert any("No space left" in problem for problem in run.problems)


def test_numbers_that_wait_for_the_disk_are_bounded(
    tmp_path: Path, full_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_KEPT_BYTES", 500)
    with pytest.warns(RuntimeWarning), RunWriter(tmp_path, manifest={}) as writer:
        full_disk.set()
        for step in range(20):
            writer.write(record(step))
            writer.flush()
        full_disk.clear()
    lost = sum(event["rows"] for event in open_run(tmp_path).events("lost"))
    assert lost >= 15
    assert len(open_run(tmp_path).steps()) == 20 - lost


def test_a_disk_that_is_full_to_the_end_does_not_raise(tmp_path: Path, full_disk: threading.Event) -> None:
    with pytest.warns(RuntimeWarning), RunWriter(tmp_path, manifest={}) as writer:
        full_disk.set()
        writer.write(record(0, tensors=1))
    assert any("took no more numbers" in sentence for sentence in writer.lost)
    assert not open_run(tmp_path).closed


def test_strict_turns_a_full_disk_into_an_error(tmp_path: Path, full_disk: threading.Event) -> None:
    writer = RunWriter(tmp_path, manifest={}, strict=True)
    full_disk.set()
    with pytest.warns(RuntimeWarning):
        writer.write(record(0, tensors=1))
        with pytest.raises(RecordingLostError, match="No space left"):
            writer.flush()
    with pytest.raises(RecordingLostError):
        writer.write(record(1))
    with pytest.raises(RecordingLostError):
        writer.close()


def test_where_warnings_are_errors_a_full_disk_still_does_not_reach_the_training(
    tmp_path: Path, full_disk: threading.Event
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with RunWriter(tmp_path, manifest={}) as writer:
            full_disk.set()
            writer.write(record(0, tensors=1))
            writer.flush()
            full_disk.clear()
    assert writer.lost


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_really_full_disk(tmp_path: Path) -> None:
    if os.system(f"mount -t tmpfs -o size=2m none {tmp_path} 2>/dev/null") != 0:
        pytest.skip("no right to mount here")
    try:
        with pytest.warns(RuntimeWarning, match="No space left"), RunWriter(tmp_path, manifest={}) as writer:
            for step in range(100):
                writer.write(record(step, tensors=1, size=4096))
                if step % 10 == 9:
                    writer.flush()
        run = open_run(tmp_path)
        assert any("tensors lost" in sentence for sentence in writer.lost)
        stored = run.tensors()
        assert 0 < len(stored) < 100
        for ref in stored:
            assert np.array_equal(run.array(ref.site, ref.step), image(ref.step, 4096))
    finally:
        os.system(f"umount {tmp_path}")


def test_an_unwritable_folder_does_not_stop_the_training(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with (
        pytest.warns(RuntimeWarning, match="nothing is recorded"),
        RunWriter(tmp_path / "run", manifest={}) as writer,
    ):
        writer.write(record(0, tensors=2))
        writer.event("warning", text="x")
        writer.flush()
    assert any("nothing is recorded" in sentence for sentence in writer.lost)
    assert any("2 tensors" in sentence for sentence in writer.lost)
    with pytest.raises(RecordingLostError, match="cannot begin a run"):
        RunWriter(tmp_path / "run", manifest={}, strict=True)


def test_a_value_that_cannot_be_stored_loses_only_itself(tmp_path: Path) -> None:
    odd = TensorItem("a:output", "value", "full", np.array(["text"]))  # type: ignore[arg-type]
    good = TensorItem("b:output", "value", "full", image(0))  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="a:output"), RunWriter(tmp_path, manifest={}) as writer:
        writer.write(StepRecord(0, None, None, "train", 0.0, (), (odd, good)))
    run = open_run(tmp_path)
    assert [ref.site for ref in run.tensors()] == ["b:output"]
    assert run.events("lost")[0]["tensors"] == 1


def test_a_block_of_the_wrong_shape_loses_only_its_record(tmp_path: Path) -> None:
    wrong = StepRecord(1, None, None, "train", 0.0, (ScalarBlock(("a",), ("mean",), np.zeros((2, 2))),), ())
    with pytest.warns(RuntimeWarning, match="shape"), RunWriter(tmp_path, manifest={}) as writer:
        writer.write(record(0))
        writer.write(wrong)
        writer.write(record(2))
    assert open_run(tmp_path).steps().tolist() == [0, 2]


# --- a slow disk --------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until set, the writer's thread stands still before the next tensor."""
    opened = threading.Event()
    original = recorder.TensorItems.add

    def add(self: recorder.TensorItems, step: int, item: TensorItem, phase: str) -> object:
        opened.wait(30)
        return original(self, step, item, phase)

    monkeypatch.setattr(recorder.TensorItems, "add", add)
    return opened


ONE = image(0, 4096).nbytes  # 64 KiB


def test_blocking_makes_the_caller_wait_and_loses_nothing(tmp_path: Path, gate: threading.Event) -> None:
    with RunWriter(tmp_path, manifest={}, queue_bytes=3 * ONE) as writer:
        threading.Timer(0.2, gate.set).start()
        for step in range(30):
            writer.write(record(step, tensors=1, size=4096))
        assert gate.is_set(), "nobody waited"
        assert writer.waited > 0
    assert len(open_run(tmp_path).tensors()) == 30
    assert writer.lost == []


def test_dropping_never_waits_keeps_the_numbers_and_counts(tmp_path: Path, gate: threading.Event) -> None:
    with (
        pytest.warns(RuntimeWarning),
        RunWriter(tmp_path, manifest={}, queue_bytes=4 * ONE, on_pressure="drop") as writer,
    ):
        for step in range(50):
            writer.write(record(step, tensors=1, size=4096))
        gate.set()
    run = open_run(tmp_path)
    kept = len(run.tensors())
    assert 1 <= kept < 10
    assert run.series(SITES[0], "mean").steps.tolist() == list(range(50))
    (event,) = run.events("lost")
    assert event["tensors"] == 50 - kept
    assert event["bytes"] == (50 - kept) * ONE
    assert event["steps"][1] == 49
    assert any(f"{50 - kept} tensors lost" in sentence for sentence in writer.lost)


def test_sampling_thins_evenly_under_pressure() -> None:
    queue = RecordQueue(8 * ONE, "sample")
    waiting: deque[tuple[StepRecord | Barrier, int]] = deque()
    kept = []
    for step in range(400):
        queue.put(record(step, tensors=1, size=4096))
        waiting.extend(queue.take(0))
        if step % 4 == 3:  # the disk takes one step's tensors while the training makes four
            while waiting:
                item, nbytes = waiting.popleft()
                queue.done(nbytes)
                if isinstance(item, StepRecord) and item.tensors:
                    kept.append(item.step)
                    break
    kept += [item.step for item, _ in waiting if isinstance(item, StepRecord) and item.tensors]
    assert queue.dropped().tensors == 400 - len(kept)
    assert 50 < len(kept) < 200
    assert max(np.diff(kept)) <= 40, "no long stretch of the training is without tensors"


def test_sampling_keeps_everything_while_the_disk_keeps_up() -> None:
    queue = RecordQueue(8 * ONE, "sample")
    for step in range(50):
        queue.put(record(step, tensors=1, size=4096))
        for _, nbytes in queue.take(0):
            queue.done(nbytes)
    assert queue.dropped().tensors == 0


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'block', 'drop' and 'sample'"):
        RunWriter(tmp_path, manifest={}, on_pressure="panic")  # type: ignore[arg-type]


def test_the_last_tensor_is_that_of_the_largest_step_whichever_attempt_recorded_it(tmp_path: Path) -> None:
    for steps in (range(10), range(3)):
        with RunWriter(tmp_path, manifest={}) as writer:
            for step in steps:
                writer.write(record(step, tensors=1))
    assert np.array_equal(open_run(tmp_path).array(SITES[0]), image(9))
