"""A later attempt whose records are damaged: the call itself tells, and gives no earlier attempt's values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.store.records import SITES, record

from torchtap.errors import RunCorruptError
from torchtap.store.read.reader import open_run
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

pytestmark = pytest.mark.usefixtures("a_file_for_each_flush")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 0 to 5, then 3 to 8 again with other values; each step is a file."""
    for attempt, steps in enumerate((range(6), range(3, 9))):
        writer = RunWriter(tmp_path / "run", manifest={}, flush_seconds=60)
        for step in steps:
            made = record(step, tensors=1)
            blocks = tuple(
                ScalarBlock(b.sites, b.statistics, b.values + 1000 * attempt) for b in made.scalars
            )
            writer.write(StepRecord(step, None, None, "train", float(step), blocks, made.tensors))
            writer.flush()
        writer.close()
    return tmp_path / "run"


def segment(folder: Path, attempt: int, step: int, kind: str = "scalars") -> Path:
    (found,) = (folder / "rank-00000" / f"attempt-{attempt:04d}").glob(f"{kind}-*_{step}-{step}.safetensors")
    return found


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_asking_for_a_step_that_the_last_attempt_lost_is_an_error(folder: Path, damage: object) -> None:
    damage(segment(folder, 1, 4))  # type: ignore[operator]
    run = open_run(folder)
    for ask in (
        lambda: run.series(SITES[0], "mean"),
        lambda: run.matrix("mean"),
        lambda: run.table(),
        lambda: run.array(SITES[0], 4),
        lambda: run.tensor(SITES[0], 4),
    ):
        with pytest.raises(RunCorruptError, match="a later attempt recorded step 4 again"):
            ask()
    assert run.problems
    assert np.array_equal(run.array(SITES[0], 5), record(5, tensors=1).tensors[0].value)


def test_partial_marks_the_step_and_gives_all_others(folder: Path) -> None:
    cut(segment(folder, 1, 4))
    expected = [0.0, 1.0, 2.0, 1003.0, np.nan, 1005.0, 1006.0, 1007.0, 1008.0]
    whole = open_run(folder)
    lenient = open_run(folder, partial=True)
    for found in (whole.series(SITES[0], "mean", partial=True), lenient.series(SITES[0], "mean")):
        assert found.steps.tolist() == list(range(9))
        np.testing.assert_array_equal(found.values, expected)
    np.testing.assert_array_equal(whole.matrix("mean", [SITES[0]], partial=True).values[0], expected)
    table = lenient.table([SITES[0]], ["mean"])
    np.testing.assert_array_equal(table["value"], expected)
    assert 4 not in {ref.step for ref in lenient.tensors()}
    with pytest.raises(RunCorruptError):  # asked without it, the same run says no
        whole.series(SITES[0], "mean")


def test_damage_where_no_earlier_attempt_has_values_is_only_a_gap(folder: Path) -> None:
    cut(segment(folder, 1, 7))
    run = open_run(folder)
    assert run.series(SITES[0], "mean").steps.tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert any("attempt 1" in problem for problem in run.problems)


def test_a_last_file_that_is_gone_is_missed_because_the_closing_counts_records(folder: Path) -> None:
    for step in (4, 5, 6, 7, 8):
        segment(folder, 1, step).unlink()
    run = open_run(folder)
    with pytest.raises(RunCorruptError, match="4, 5"):
        run.series(SITES[0], "mean")
    assert any("5 records are missing" in problem for problem in run.problems)


def test_damage_to_an_earlier_attempt_that_is_hidden_changes_nothing(folder: Path) -> None:
    cut(segment(folder, 0, 4))
    run = open_run(folder)
    assert run.series(SITES[0], "mean").values.tolist() == [0, 1, 2, 1003, 1004, 1005, 1006, 1007, 1008]


def test_each_attempt_alone_can_still_be_read(folder: Path) -> None:
    cut(segment(folder, 1, 4))
    assert open_run(folder, attempt=0).series(SITES[0], "mean").values.tolist() == [0, 1, 2, 3, 4, 5]
    assert open_run(folder, attempt=1).series(SITES[0], "mean").steps.tolist() == [3, 5, 6, 7, 8]


def test_a_hundred_attempts_are_put_in_order_at_once(tmp_path: Path) -> None:
    for attempt in range(100):
        with RunWriter(tmp_path / "run", manifest={}) as writer:
            block = ScalarBlock(("x",), ("mean",), np.array([[float(attempt)]]))
            for step in (attempt, attempt + 1):
                writer.write(StepRecord(step, None, None, "train", 0.0, (block,), ()))
    found = open_run(tmp_path / "run").series("x", "mean")
    assert found.values.tolist() == [*map(float, range(100)), 99.0]
