"""Progress: who is told, when a bar is shown, and that nothing is where nobody looks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.viewer.recordings import small_run
from torch import nn

import torchtap as tt
from torchtap import progress
from torchtap.progress import Bar, count, note, showing, tracked


def test_a_function_is_told_what_is_done_and_of_how_many() -> None:
    told: list[tuple[str, int, int | None]] = []
    with showing(lambda *facts: told.append(facts)):
        assert list(tracked([5, 6, 7], "counting")) == [5, 6, 7]
        count("passes")
        count("passes")
    note("nobody")
    assert told[0] == ("counting", 0, 3)
    assert told[-3:] == [("counting", 3, 3), ("passes", 1, None), ("passes", 2, None)]


def test_compare_and_diagnose_report_to_a_function(tmp_path: Path) -> None:
    told: list[str] = []
    small_run(tmp_path / "run")
    tt.diagnose(tmp_path / "run", progress=lambda what, *_: told.append(what))
    model = nn.Linear(3, 2)
    tt.compare(model, model, inputs=(torch.ones(1, 3),), progress=lambda what, *_: told.append(what))
    assert {"judging steps", "comparing: forward passes"} <= set(told)


def test_a_bar_appears_on_a_terminal_after_a_while_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = Bar()
    bar("reading runs", 1, 4)
    assert bar._bars is not None
    assert str(bar) == "reading runs, 1 of 4"
    bar.close()
    assert bar._bars is None


@pytest.mark.parametrize("words", [["diagnose"], ["diagnose", "--quiet"]])
def test_in_a_pipe_there_is_no_bar(tmp_path: Path, words: list[str]) -> None:
    small_run(tmp_path / "run")
    command = [sys.executable, "-m", "torchtap", words[0], str(tmp_path / "run"), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    assert "judging" not in done.stdout


def test_an_interrupted_command_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torchtap.cli import main

    small_run(tmp_path / "run")

    def stops(*_: object, **__: object) -> None:
        note("judging steps", 3, 20)
        raise KeyboardInterrupt

    monkeypatch.setattr("torchtap.diagnosis.diagnose.diagnose", stops)
    with pytest.raises(SystemExit) as stopped:
        main(["diagnose", str(tmp_path / "run")])
    assert stopped.value.code == 130
    assert capfd.readouterr().err.strip() == "torchtap: stopped while judging steps, 3 of 20"
