"""The fast part of ``make torture``, and proof that its attacks can be lost."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.store.records import SITES, STATISTICS, image, number, record
from tests.torture.damage import damaged_runs, memory_disk
from tests.torture.dying import killed_recordings
from tests.torture.faults import failing_disk
from tests.torture.lying_disk import lost_power
from tests.torture.scale import many_sites, many_steps, reader_beside_writer, two_writers

from torchtap.errors import TorchtapError
from torchtap.store.files.folder import LocalDestination
from torchtap.store.format import checksum
from torchtap.store.read.reader import open_run
from torchtap.store.write.writer import RunWriter


def test_damaged_runs_give_right_data_or_an_error_of_torchtap() -> None:
    tally = damaged_runs(120, seed=11, exports=60)
    assert tally["damaged runs"] == 120
    assert tally["exports written"] > 0


def test_flushed_steps_survive_a_loss_of_power() -> None:
    assert lost_power(60, seed=5)["flushed steps, all there"] > 100


def test_a_recorder_that_never_syncs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalDestination, "sync", lambda self, only=None: None)
    with pytest.raises(AssertionError, match=r"flushed|gone"):
        lost_power(200, seed=5)


def test_a_disk_that_fails_at_random_costs_only_what_is_told() -> None:
    assert failing_disk(25, seed=3)["failed calls"] > 5


def test_recordings_that_die_in_a_merge_or_in_closing_have_all_that_was_flushed() -> None:
    died = killed_recordings(12, seed=21)
    assert sum(count for way, count in died.items() if way.startswith("recordings")) == 15
    assert died["recordings, in a merge"] >= 3


def test_a_reader_beside_a_writer_sees_whole_steps_and_loses_none() -> None:
    assert reader_beside_writer(2.0)["looks"] > 3


def test_two_processes_in_one_folder_get_an_attempt_each() -> None:
    assert two_writers(0.5)["steps"] > 2


def test_many_steps_and_many_sites_are_read_back() -> None:
    assert many_steps(20_000)["files"] < 100
    assert many_sites(3_000)["sites"] == 3_000


def test_a_reader_without_checksums_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtap.store.format.segment.is_sealed", lambda raw: True)
    monkeypatch.setattr("torchtap.store.format.segment.verify", lambda buffer, expected: None)
    with pytest.raises((AssertionError, Exception)) as caught:
        damaged_runs(400, seed=2, exports=10_000)
    assert not isinstance(caught.value, TorchtapError)
    assert checksum.is_sealed  # the reader's own name for it was replaced, not the function


class Recording(RuleBasedStateMachine):
    """A writer, a reader that stays open, and crashes: an image of the folder is what a dead process leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory(dir=memory_disk())
        self.folder = Path(self.home.name) / "run"
        self.expected: dict[int, int] = {}  # by step: the attempt whose value counts
        self.flushed: dict[int, int] = {}  # the same of what was flushed
        self.step = 0
        self.attempt = -1
        self.reader = None

    @initialize(seconds=st.sampled_from([0.001, 60.0]))
    def begin(self, seconds: float) -> None:
        self.seconds = seconds
        self._start()

    def _start(self) -> None:
        self.writer = RunWriter(
            self.folder,
            manifest={"attempt of": self.attempt + 1},
            flush_seconds=self.seconds,
            segment_bytes=4000,
        )
        self.attempt = self.writer.attempt

    @rule(tensors=st.integers(0, 2), skipped=st.integers(1, 3))
    def write(self, tensors: int, skipped: int) -> None:
        self.writer.write(
            record(self.step, tensors=tensors, size=(8, 200)[self.step % 2], epoch=self.attempt)
        )
        self.expected[self.step] = self.attempt
        self.step += skipped

    @rule()
    def note(self) -> None:
        self.writer.event("tick", step=self.step)

    @rule()
    def flush(self) -> None:
        self.writer.flush()
        self.flushed |= self.expected

    @rule(back=st.integers(0, 5))
    def crash_and_begin_again(self, back: int) -> None:
        """The process dies; a new one records from some steps before."""
        image_of = Path(self.home.name) / "image"
        _take_image(self.folder, image_of)
        self.writer.close()  # the old one is gone: what it does from here on is not in the image
        shutil.rmtree(self.folder)
        image_of.rename(self.folder)
        there: dict[
            int, int
        ] = {}  # of a step that was recorded again and not flushed, the earlier attempt's is left
        with suppress(TorchtapError) if not self.flushed else nullcontext():
            clock = open_run(self.folder).clock()
            there = dict(zip(clock["step"].tolist(), clock["epoch"].tolist(), strict=True))
        for step, attempt in self.flushed.items():
            assert there.get(step, -1) >= attempt, "a flushed step is gone"
        self.expected = there
        self.step = max(0, self.step - back)
        self.reader = None
        self._start()

    @rule()
    def close_and_begin_again(self) -> None:
        self.writer.close()
        self.flushed |= self.expected
        self.reader = None
        self._start()

    @rule()
    def look(self) -> None:
        """A reader that was opened long ago sees everything that was flushed, and nothing wrong."""
        if not self.flushed:
            return
        if self.reader is None:
            self.reader = open_run(self.folder)  # type: ignore[assignment]
        run = self.reader
        assert run is not None
        run.refresh()
        assert set(self.flushed) <= set(run.steps().tolist())
        for site, name in enumerate(SITES):
            found = run.series(name, STATISTICS[site])
            assert found.values.tolist() == [number(step, site, site) for step in found.steps.tolist()]
        clock = run.clock()
        for step, epoch in zip(clock["step"].tolist(), clock["epoch"].tolist(), strict=True):
            assert epoch >= self.flushed.get(step, 0), "an earlier attempt's record came through"
        for ref in run.tensors()[-5:]:
            index = int(ref.field.removeprefix("value") or 0)
            size = (8, 200)[ref.step % 2]
            assert np.array_equal(run.array(ref.site, ref.step, ref.field), image(ref.step + index, size))

    @invariant()
    def no_trouble(self) -> None:
        if hasattr(self, "writer"):
            assert self.writer.lost == []

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()
        self.home.cleanup()


def _take_image(folder: Path, target: Path) -> None:
    """The folder as it was at one moment: copied again if the writer's thread changed it meanwhile."""
    while True:
        before = sorted(folder.rglob("*"))
        shutil.rmtree(target, ignore_errors=True)
        with suppress(shutil.Error, FileNotFoundError):
            shutil.copytree(folder, target)
            if sorted(folder.rglob("*")) == before:
                return


TestRecording = Recording.TestCase
TestRecording.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
