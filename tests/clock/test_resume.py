"""A folder that holds steps already is continued after them, or the user is told before anything is hidden."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtap as tt


def fit(folder: Path, steps: int, **follow: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(model, folder, "*:output") as watch:
        watch.follow(optimizer, **follow)
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def test_a_second_fit_goes_on_after_the_first(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(tmp_path, 4)
        fit(tmp_path, 3)
    run = tt.open(tmp_path)
    assert run.steps().tolist() == list(range(7))
    assert run.series(":output", "count").steps.tolist() == list(range(7))


def test_a_start_that_hides_recorded_steps_is_told_before(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    with pytest.warns(RuntimeWarning, match=r"holds steps up to 3 .* begins at step 2 and hides"):
        fit(tmp_path, 4, start=2)
    assert tt.open(tmp_path).steps().tolist() == list(range(6))


def test_a_start_beyond_the_recorded_steps_hides_nothing(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(tmp_path, 2, start=10)
    assert tt.open(tmp_path).steps().tolist() == [0, 1, 2, 3, 10, 11]


def test_blocks_go_on_too_and_a_number_that_hides_is_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for _ in range(2):
        with tt.watch(model, tmp_path, "*:output") as watch:
            for _ in range(2):
                with watch.step():
                    model(torch.ones(1, 2))
    assert tt.open(tmp_path).steps().tolist() == [0, 1, 2, 3]
    with (
        pytest.warns(RuntimeWarning, match="begins at step 1 and hides"),
        tt.watch(model, tmp_path, "*:output") as watch,
        watch.step(1),
    ):
        model(torch.ones(1, 2))


def test_start_is_refused_once_a_step_has_begun() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(model, None, "*:output") as watch:
        watch.follow(optimizer)
        with pytest.raises(tt.SessionError, match="has begun already"):
            watch.follow(optimizer, start=3)
    with tt.watch(model, None, "*:output") as watch, pytest.raises(tt.SessionError, match="whole number"):
        watch.follow(optimizer, start=-1)
