"""Files at the end of a closed run that are gone: no name is left that shows a gap, so the closing tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torchtap as tt


def recorded(folder: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taps = [tt.tap("*:output", keep=tt.Full()), tt.tap("*:output", keep=tt.Stats())]
    with tt.watch(model, folder, taps).follow(optimizer):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    return folder


def test_a_whole_run_has_no_problem(tmp_path: Path) -> None:
    assert tt.open(recorded(tmp_path / "run")).problems == []


@pytest.mark.parametrize("kind", ["scalars", "tensors", "events"])
def test_the_last_files_of_a_kind_are_missed(tmp_path: Path, kind: str) -> None:
    whole, cut = recorded(tmp_path / "a"), recorded(tmp_path / "b")
    gone = list(cut.rglob(f"{kind}-*"))
    assert gone
    for path in gone:
        path.unlink()
    assert any("missing" in problem for problem in tt.open(cut).problems)
    for pair in ((whole, cut), (cut, whole)):
        try:
            outcome = tt.compare(*pair).outcome
        except tt.TorchtapError:
            continue  # nothing is left to compare
        assert outcome != "same"
