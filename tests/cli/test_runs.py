"""``torchtap runs``: what is listed, what would be deleted, what is deleted, what a merged run holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.viewer.recordings import small_run
from tests.viewer.states import STATES, write_states

import torchtap as tt
from torchtap.cli import main
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter


@pytest.fixture
def states(tmp_path: Path) -> Path:
    return write_states(tmp_path / "runs")


def call(capfd: pytest.CaptureFixture[str], *words: object, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    assert stopped.value.code == code, capfd.readouterr()
    return capfd.readouterr()


def there(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_list_has_last_and_best_of_every_value_and_says_nan(
    states: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = {line["name"]: line for line in json.loads(call(capfd, "runs", "list", states, "--json")[0])}
    assert set(lines) == set(STATES)
    values = tt.open(states / "nan").series("loss").values
    assert lines["nan"]["values"]["loss"][0] == "nan"
    assert lines["nan"]["values"]["loss"][1] == pytest.approx(np.nanmin(values))
    assert lines["healthy"]["seconds"] == 78.0
    text = call(capfd, "runs", "list", states)[0]
    assert "NaN" in next(line for line in text.splitlines() if line.startswith("nan "))
    assert (
        call(capfd, "runs", "list", states, "--where", "steps > 30 and loss = nan")[0]
        .splitlines()[-1]
        .startswith("1 run,")
    )


def test_nothing_is_deleted_without_yes(states: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = call(capfd, "runs", "delete", states / "nan")
    assert out.startswith("would delete")
    assert "nothing was deleted" in err
    call(capfd, "runs", "prune", states, "--where", "loss = nan")
    assert there(states) == set(STATES)
    call(capfd, "runs", "delete", states / "nan", "--yes")
    assert there(states) == set(STATES) - {"nan"}


@pytest.mark.parametrize(
    ("conditions", "gone"),
    [
        (["--where", "loss = nan"], {"nan"}),
        (["--where", "steps < 30"], {"gaps", "empty"}),
        (["--larger-than", "20kB"], {"ranks"}),
        (["--older-than", "1d"], set(STATES)),
        (["--older-than", "2000w"], set()),
        (["--where", "lr <= 0.01 and state != empty"], {"gaps", "ranks"}),
        (["--keep-best", "3"], {"nan", "empty"}),
        (["--keep-best", "1", "--by", "accuracy", "--where", "steps = 40"], {"healthy", "nan", "ranks"}),
    ],
)  # fmt: skip
def test_prune_deletes_what_fulfils_all_conditions(
    states: Path, capfd: pytest.CaptureFixture[str], conditions: list[str], gone: set[str]
) -> None:
    call(capfd, "runs", "prune", states, *conditions, "--yes")
    assert there(states) == set(STATES) - gone


def test_a_tag_keeps_a_run_and_a_written_one_is_never_touched(
    states: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    call(capfd, "runs", "tag", states / "nan", "--add", "keep", "--add", "bad", "--remove", "bad")
    writer = small_run(states / "live", close=False)
    try:
        call(capfd, "runs", "prune", states, "--older-than", "1d", "--yes")
        assert there(states) == {"nan", "live"}
        _, err = call(capfd, "runs", "delete", states / "live", "--yes", code=2)
        assert "still being written" in err
    finally:
        writer.close()


@pytest.mark.parametrize(
    "words", [["delete", "{}", "--yes"], ["rename", "{}", "x"], ["tag", "{}", "--add", "x"]]
)
def test_what_is_no_run_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"x")
    small_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for name in ("photos", "absent", "link"):
        _, err = call(capfd, "runs", *(word.format(tmp_path / name) for word in words), code=2)
        assert err.count("torchtap:") == 1
    assert (tmp_path / "photos" / "one.jpg").is_file()
    assert tt.open(tmp_path / "run").closed


def test_rename_and_copy(states: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = tt.open(states / "nan").series("loss").values
    call(capfd, "runs", "rename", states / "nan", "broken")
    call(capfd, "runs", "copy", states / "broken", tmp_path / "elsewhere" / "again")
    np.testing.assert_array_equal(tt.open(tmp_path / "elsewhere" / "again").series("loss").values, before)
    _, err = call(capfd, "runs", "copy", states / "broken", tmp_path / "elsewhere" / "again", code=0)
    assert (tmp_path / "elsewhere" / "again" / "broken").is_dir() or err  # into a folder that is there
    _, err = call(capfd, "runs", "rename", states / "gaps", "broken", code=2)
    assert "already" in err


def _write(folder: Path, steps: range, offset: float, *, rank: int = 0, world: int = 1) -> None:
    with RunWriter(folder, manifest={"labels": {"lr": 1.0}}, rank=rank, world=world) as writer:
        for step in steps:
            values = np.array([[step + offset, math.nan if step == 3 else 1.0]])
            block = ScalarBlock(("a:output",), ("rms", "std"), values)
            writer.write(StepRecord(step, step // 4, None, "train", 5.0 + step, (block,), ()))


def test_a_training_and_its_resumption_merge_into_one_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "a", range(8), 0.0)
    _write(tmp_path / "b", range(6, 12), 0.5)
    call(capfd, "runs", "merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "whole")
    run = tt.open(tmp_path / "whole")
    assert run.problems == []
    expected = [*range(6), *(step + 0.5 for step in range(6, 12))]
    assert run.series("a:output", "rms").values.tolist() == expected
    stds = run.series("a:output", "std").values
    assert np.isnan(stds).tolist() == [step == 3 for step in range(12)]
    assert run.clock()["epoch"].max() == 2
    assert run.manifest["labels"] == {"lr": 1.0}


def test_ranks_of_two_folders_merge_into_one_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        _write(tmp_path / f"node{rank}", range(5), float(rank), rank=rank, world=2)
    call(capfd, "runs", "merge", tmp_path / "node0", tmp_path / "node1", "-o", tmp_path / "whole", "--json")
    run = tt.open(tmp_path / "whole")
    assert run.ranks == [0, 1]
    assert run.rank(1).series("a:output", "rms").values.tolist() == [step + 1.0 for step in range(5)]


def test_a_merge_that_fails_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    _write(tmp_path / "a", range(8), 0.0)
    _write(tmp_path / "b", range(6, 12), 0.5)

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchtap.viewer.manage._append", fails)
    _, err = call(capfd, "runs", "merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "whole", code=130)
    assert err.strip().startswith("torchtap: stopped")
    assert there(tmp_path) == {"a", "b"}


def test_a_misspelled_inner_command_names_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    _, err = call(capfd, "runs", "lst", code=2)
    assert "did you mean 'list'?" in err
