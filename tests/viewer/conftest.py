"""Runs that the viewer's tests look at: recorded once, by real trainings."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.viewer.recordings import train

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
