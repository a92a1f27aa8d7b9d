"""Two runs with evaluations, other schedules, or steps that one of them left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtap as tt

STEPS = 6


def trained(
    folder: Path,
    *,
    evaluated: float | None = 1.0,
    steps: int = STEPS,
    logged: bool = True,
    rate: float = 0.1,
    **schedule: Any,
) -> Path:
    """A training that evaluates before every second step, on data of the size ``evaluated``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    taps = [tt.tap(f"*:{kind}", **schedule) for kind in ("output", "param", "param_grad")]
    with tt.watch(model, folder, taps).follow(optimizer) as watch:
        for step in range(steps):
            if evaluated is not None and step % 2 == 0:
                model.eval()
                with torch.no_grad():
                    model(torch.full((3, 4), evaluated))
                model.train()
            optimizer.zero_grad()
            loss = model(torch.full((2, 4), 1.0 + step)).pow(2).mean()
            loss.backward()
            optimizer.step()
            if logged:
                watch.log(loss=loss)
    return folder


def test_evaluations_that_agree_are_told_beside_the_training(tmp_path: Path) -> None:
    result = tt.compare(trained(tmp_path / "a"), trained(tmp_path / "b"))
    assert result.outcome == "same"
    assert "In phase eval: no divergence" in result.verdict


def test_an_evaluation_that_alone_differs_is_found(tmp_path: Path) -> None:
    result = tt.compare(trained(tmp_path / "a"), trained(tmp_path / "b", evaluated=1.5))
    assert result.outcome == "differs"
    assert result.first is not None
    assert result.first.site == "0:output"
    assert result.verdict.startswith("In phase eval: at step 0")


def test_a_training_that_differs_is_told_rather_than_the_evaluation_that_follows_from_it(
    tmp_path: Path,
) -> None:
    result = tt.compare(trained(tmp_path / "a"), trained(tmp_path / "b", rate=0.2))
    assert result.outcome == "differs"
    assert "phase eval" not in result.verdict
    assert "every update" in result.verdict


def test_a_phase_that_only_one_run_has_cannot_be_called_the_same(tmp_path: Path) -> None:
    whole, bare = trained(tmp_path / "a"), trained(tmp_path / "b", evaluated=None)
    for pair in ((whole, bare), (bare, whole)):
        result = tt.compare(*pair)
        assert result.outcome == "cannot tell"
        assert "phase eval was not compared" in result.verdict


@pytest.mark.parametrize("logged", [True, False])
def test_another_schedule_accuses_nobody_and_is_told(tmp_path: Path, logged: bool) -> None:
    often = trained(tmp_path / "a", evaluated=None, logged=logged)
    seldom = trained(tmp_path / "b", evaluated=None, logged=logged, every=3)
    for pair in ((often, seldom), (seldom, often)):
        result = tt.compare(*pair)
        assert result.outcome == "cannot tell", result.verdict
        assert "steps" in result.verdict
    assert tt.compare(often, seldom, steps=[0, 3]).outcome == "same"


def odd(moment: Any) -> bool:
    return moment.step % 2 == 1 or moment.step == 0


@pytest.mark.parametrize("logged", [True, False])
def test_steps_that_a_plan_leaves_out_by_itself_do_not_keep_runs_from_being_the_same(
    tmp_path: Path, logged: bool
) -> None:
    whole = trained(tmp_path / "a", evaluated=None, logged=logged, when=lambda moment: True)
    paced = trained(tmp_path / "b", evaluated=None, logged=logged, when=odd)
    result = tt.compare(whole, paced)
    assert result.outcome == "same", result.verdict
    assert any("steps" in problem for problem in result.problems)
    wrong = trained(tmp_path / "c", evaluated=None, logged=logged, when=odd, rate=0.2)
    assert tt.compare(whole, wrong).outcome == "differs"


def test_a_training_that_ended_earlier_is_not_the_same_whatever_its_plan(tmp_path: Path) -> None:
    whole = trained(tmp_path / "a", evaluated=None, when=odd)
    short = trained(tmp_path / "b", evaluated=None, when=odd, steps=STEPS - 2)
    assert tt.compare(whole, short).outcome == "cannot tell"
