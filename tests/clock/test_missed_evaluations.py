"""Evaluations that no tap was live for are told of once, at the end, and only where none was recorded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtap as tt

TOLD = "was evaluated .* times .*no tap was live"


def train(
    folder: Path, taps: Sequence[object], *, before: bool, phase: str | None = None, looks: int = 3
) -> tt.Run:
    """A loop that evaluates every fourth step, before its update or after it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = tt.watch(model, folder, taps).follow(optimizer)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            if phase is None:
                model(torch.ones(2, 3))
            else:
                with watch.phase(phase):
                    model(torch.ones(2, 3))
        model.train()

    for step in range(4 * looks + 1):
        if before and step and step % 4 == 0:
            evaluate()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if not before and step and step % 4 == 0:
            evaluate()
    watch.close()
    return tt.open(folder)


def test_evaluations_that_fall_between_the_live_steps_are_told_of(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=TOLD + r".*tt.tap\(..., phase='eval'\)"):
        run = train(tmp_path / "run", [tt.tap("*:output", every=4)], before=True)
    assert run.phases == ["train"]


def test_a_phase_that_no_tap_names_is_told_of(tmp_path: Path) -> None:
    taps = [tt.tap("*:output", every=4, phase="train"), tt.tap("*:output", phase="eval")]
    with pytest.warns(RuntimeWarning, match=r"3 times \(phase 'valid'\)"):
        train(tmp_path / "run", taps, before=False, phase="valid")


@pytest.mark.parametrize(
    ("taps", "before", "looks"),
    [
        ([tt.tap("*:output", every=4)], False, 3),  # the evaluations are at live steps
        ([tt.tap("*:output", every=4), tt.tap("2:output", phase="eval")], True, 3),
        ([tt.tap("*:output", every=4, phase="train")], True, 3),  # left out on purpose
        ([tt.tap("*:param_grad", every=4)], True, 3),  # what no evaluation has
        ([tt.tap("*:output", every=3)], True, 1),  # a single look, such as a test at the end
    ],
)
def test_nothing_is_said_otherwise(taps: list[object], before: bool, looks: int, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "run", taps, before=before, looks=looks)
