"""A run with a limit on the disk: older records are thinned out regularly, and the whole training stays visible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import torchtap as tt
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write import segments, thin
from torchtap.store.write.writer import RunWriter

SITES = tuple(f"blocks.{number}:output" for number in range(40))
SELDOM = tuple(f"blocks.{number}:param.weight" for number in range(40))
STATISTICS = ("count", "mean", "l2")


def record(step: int) -> StepRecord:
    """Outputs at every step, parameters at steps 1, 5, 9 ..., a loss at every step."""
    blocks = [
        ScalarBlock((":value.loss",), ("value",), np.array([[1 / (1 + step)]])),
        ScalarBlock(SITES, STATISTICS, np.full((len(SITES), 3), float(step))),
    ]
    if step % 4 == 1:
        blocks.append(ScalarBlock(SELDOM, STATISTICS, np.full((len(SELDOM), 3), -float(step))))
    return StepRecord(step, None, None, "train", float(step), tuple(blocks), ())


def written(folder: Path, steps: int, disk: int | None, alerts: tuple[int, ...] = ()) -> None:
    with RunWriter(folder, manifest={}, disk=disk, flush_seconds=1e9) as writer:
        for step in range(steps):
            writer.write(record(step))
            if step in alerts:
                writer.alert("error", "t", "", step, None)
            if step % 50 == 49:
                writer.flush()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setitem(segments.FULL, "scalars", 64 << 10)


LIMIT = 2_000_000


def test_a_run_stays_below_its_limit_and_shows_the_whole_training(tmp_path: Path) -> None:
    written(tmp_path, 4000, LIMIT, alerts=(1234,))
    assert size_of(tmp_path) < LIMIT
    run = tt.open(tmp_path)
    assert run.problems == []
    assert run.manifest["disk_limit"] == LIMIT
    for site, statistic, sign, first in (
        ("blocks.3:output", "l2", 1, 0),
        ("blocks.3:param.weight", "l2", -1, 1),
    ):
        found = run.series(site, statistic)
        assert found.values.tolist() == (sign * found.steps).tolist()  # a value stays with its step
        assert found.steps[0] == first
        assert found.steps[-1] >= 3990
        assert len(found.steps) > 100
        gaps = np.diff(found.steps)
        age = 4000 - found.steps[:-1]
        assert (gaps <= np.maximum(8, age)).all()  # no hole that is longer than the time since
    outputs = run.series("blocks.3:output", "l2").steps
    assert set(range(1234 - 32, 1234 + 33)) <= set(outputs.tolist())
    assert len(run.series("loss").steps) == 4000  # narrow series keep everything


def test_older_records_are_kept_by_powers_of_two() -> None:
    number = np.arange(1000)
    kept = thin.is_kept(number, np.full(1000, 999), np.full(1000, 100))
    assert kept[900:].all()
    assert kept[0]
    for low, high, stride in ((800, 899, 2), (600, 799, 4), (200, 599, 8)):
        here = np.flatnonzero(kept[low:high]) + low
        assert len(here)
        assert (here % stride == 0).all()
    assert kept.sum() <= thin.kept_rows(1000, 100) * 1.1


def test_windows_fit_and_narrow_series_keep_everything() -> None:
    windows = thin.thinning_windows([10**6, 10**5, 10**5], [88, 500_000, 100_000], 2 * 10**9)
    total = sum(
        thin.kept_rows(length, int(window)) * width
        for length, window, width in zip((10**6, 10**5, 10**5), windows, (88, 500_000, 100_000), strict=True)
    )
    assert total <= 2 * 10**9
    assert windows[0] >= 10**6
    assert windows[2] > windows[1]


def test_without_a_limit_nothing_is_thinned(tmp_path: Path) -> None:
    written(tmp_path, 1000, None)
    run = tt.open(tmp_path)
    assert len(run.series("blocks.3:output", "l2").steps) == 1000


def test_a_run_that_was_killed_while_it_was_thinned_reads_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources that a killed process left beside the merged segment do not count twice."""
    from torchtap.store.files.folder import LocalDestination

    monkeypatch.setattr(LocalDestination, "remove", lambda self, name: None)
    written(tmp_path, 3000, LIMIT)
    run = tt.open(tmp_path)
    found = run.series("blocks.3:output", "l2")
    assert len(found.steps) == len(set(found.steps.tolist()))
    assert found.values.tolist() == found.steps.tolist()
    assert run.problems == []
