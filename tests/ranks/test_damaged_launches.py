"""Restarted trainings of several ranks whose notes are damaged: launches keep their order."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import torchtap as tt
from torchtap.errors import TorchtapError
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

RANKS, LAUNCHES = 2, 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three launches of two ranks; each records steps 0 to 3 again, with its own number as the value."""
    folder = tmp_path / "run"
    for launch, rank in itertools.product(range(LAUNCHES), range(RANKS)):
        with RunWriter(folder, rank=rank, world=RANKS, manifest={}) as writer:
            for step in range(4):
                block = ScalarBlock(("a:output",), ("mean",), np.array([[float(launch)]]))
                writer.write(StepRecord(step, None, None, "train", 0.0, (block,), ()))
    return folder


PARTS = list(itertools.product(range(RANKS), range(LAUNCHES)))


@pytest.mark.parametrize(
    "damaged", [each for count in (1, 2, 3) for each in itertools.combinations(PARTS, count)]
)
def test_an_attempt_without_readable_notes_never_gives_way_to_an_earlier_one(
    run: Path, damaged: tuple[tuple[int, int], ...]
) -> None:
    for rank, attempt in damaged:
        for name in ("manifest.json", "launch.json"):
            note = run / f"rank-{rank:05d}" / f"attempt-{attempt:04d}" / name
            if note.exists():
                note.write_text("{}x")
    try:
        found = tt.open(run).series("a:output", "mean")
    except TorchtapError:
        return  # refused: nothing false was said
    assert set(found.values.tolist()) <= {float(LAUNCHES - 1)}
