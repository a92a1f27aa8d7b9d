"""`torchtap diagnose`: findings for people and for programs, and an exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtap as tt
from torchtap.cli import main


def run_of(folder: Path, *, broken: bool) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.watch(model, folder, ["*:output", "*:param"]) as watch:
        watch.follow(optimizer)
        for step in range(4):
            if broken and step == 2:
                with torch.no_grad():
                    model[2].weight[0, 0] = float("nan")
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return str(folder)


def ask(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", *words])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_a_run_with_few_records_is_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ask([run_of(tmp_path / "run", broken=False)], capsys)
    assert code == 3
    assert said.startswith("not judged: too little was recorded")
    assert re.search(r": \d+ of \d+ rules judged, \d+ of \d+ steps; not judged: ", said)


def test_a_healthy_training_under_a_doctor_ends_with_zero_and_states_its_coverage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    truth = torch.randn(4, 3)
    with tt.doctor(model, optimizer, run=tmp_path / "run", quiet=True):
        for _ in range(40):
            x = torch.randn(32, 4)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), (x @ truth).argmax(1)).backward()
            optimizer.step()
    code, said = ask([str(tmp_path / "run")], capsys)
    assert code == 0
    assert said.startswith("no problem found: ")
    assert "40 of 40 steps" in said


def test_rules_that_cannot_judge_say_what_to_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, said = ask([run_of(tmp_path / "run", broken=False), "--rules"], capsys)
    told = {line.split(": ")[1]: line for line in said.splitlines() if line.startswith("not judged")}
    assert "record zeros of *:update" in told["lost-updates"]
    assert "tt.doctor(model, optimizer)" in told["stale-gradient"]
    assert "nonfinite" not in told


def test_an_error_ends_with_one_and_names_site_and_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_of(tmp_path / "run", broken=True)
    code, said = ask([folder], capsys)
    assert code == 1
    assert "2" in said.splitlines()[0]
    assert "nonfinite" in said.splitlines()[0]
    code, text = ask([folder, "--json"], capsys)
    first = json.loads(text)[0]
    assert (code, first["severity"], first["step"]) == (1, "error", 2)
    assert first["causes"]
    assert first["evidence"][0]["site"] == first["site"]


def test_a_folder_that_is_no_run_is_an_error_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = ask([str(tmp_path / "nothing")], capsys)
    assert code == 2
