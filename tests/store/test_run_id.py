"""A file of another run in a run's folder is reported and not read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.store.records import SITES, image, number, record
from tests.torture.crafting import forget_run_id

from torchtap.store.read.reader import open_run
from torchtap.store.write.writer import RunWriter

pytestmark = pytest.mark.usefixtures("a_file_for_each_flush")

PART = Path("rank-00000") / "attempt-0000"


def made(path: Path, shift: int) -> Path:
    """A run of four steps, each in a file of its own, whose numbers tell which run they are of."""
    with RunWriter(path, manifest={}) as writer:
        for step in range(4):
            writer.write(record(step + shift, tensors=1))
            writer.event("mark", run=path.name)
            writer.flush()
        shutil.copytree(path, path.with_suffix(".live"))
    return path.with_suffix(".live")


@pytest.mark.parametrize("kind", ["scalars", "tensors", "events"])
def test_a_file_of_another_run_under_the_same_name_is_reported_and_not_read(
    tmp_path: Path, kind: str
) -> None:
    ours, theirs = made(tmp_path / "ours", 0), made(tmp_path / "theirs", 0)
    for path in (theirs / PART).glob(f"{kind}-00000002*"):
        shutil.copy(path, ours / PART / path.name)
    run = open_run(ours)
    problems = [problem for problem in run.problems if "belongs to another run" in problem]
    if kind == "tensors":  # their heads are read when one of them is needed
        assert np.array_equal(run.array(SITES[0], 1), image(1))
        with pytest.raises(LookupError):
            run.array(SITES[0], 2)
        problems = [problem for problem in run.problems if "belongs to another run" in problem]
    elif kind == "scalars":
        assert run.series(SITES[0], "mean").steps.tolist() == [0, 1, 3]
    else:
        assert [event["run"] for event in run.events("mark")] == ["ours"] * 3
    assert len(problems) == 1
    assert f"{kind}-00000002" in problems[0]


def test_a_manifest_of_another_run_makes_no_number_pass_as_its_own(tmp_path: Path) -> None:
    ours, theirs = made(tmp_path / "ours", 0), made(tmp_path / "theirs", 100)
    shutil.copy(theirs / PART / "manifest.json", ours / PART / "manifest.json")
    run = open_run(ours)
    assert len(run.steps()) == 0
    assert sum("belongs to another run" in problem for problem in run.problems) >= 4


def test_an_event_may_have_a_fact_called_run_id(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={"run_id": "mine"}) as writer:
        writer.event("note", run_id="of the tracker")
        writer.write(record(0))
    run = open_run(tmp_path)
    assert [event["run_id"] for event in run.events("note")] == ["of the tracker"]
    assert all("@run_id" not in event for event in run.events())
    assert run.problems == []


def test_a_run_without_an_id_opens_as_before(tmp_path: Path) -> None:
    ours = made(tmp_path / "ours", 0)
    forget_run_id(ours / PART)
    run = open_run(ours)
    assert run.series(SITES[0], "mean").values.tolist() == [number(step, 0, 0) for step in range(4)]
    assert not any("another run" in problem for problem in run.problems)
