"""Runs that the viewer's tests look at: recorded once, by real trainings."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.viewer.recordings import small_run, train

import torchtap as tt


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that goes wrong at step 24."""
    return train(tmp_path_factory.mktemp("runs") / "first", steps=30, breaks_at=24, dead=True)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model from another seed, going well."""
    taps = [tt.tap("*:output", keep=tt.Stats()), tt.tap("*:param_grad", keep=tt.Stats())]
    return train(tmp_path_factory.mktemp("runs") / "second", steps=30, seed=3, taps=taps)


@pytest.fixture
def shelf_folder(tmp_path: Path) -> Path:
    """A folder with six small runs, nested, with labels; one diverged."""
    for number in range(6):
        labels = {
            "lr": 10.0 ** -(1 + number % 3),
            "optimizer": "adam" if number % 2 else "sgd",
            "seed": number,
        }
        place = tmp_path / "runs" / ("sweep" if number < 4 else "") / f"run-{number}"
        small_run(place, labels=labels, scale=1e6 if number == 5 else 1.0)
    return tmp_path / "runs"
