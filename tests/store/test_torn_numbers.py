"""A file of numbers with damaged bytes costs its own steps and no others."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import torchtap as tt
from torchtap.errors import RunCorruptError
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

pytestmark = pytest.mark.usefixtures("a_file_for_each_flush")

SITES, STATISTICS = ("a:output", "b:output"), ("mean", "std")


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """Three files of four steps; in the middle one a byte of the numbers is another."""
    folder = tmp_path / "run"
    writer = RunWriter(folder, manifest={})
    for step in range(12):
        names = SITES if step % 2 else SITES[:1]
        values = np.full((len(names), len(STATISTICS)), float(step))
        writer.write(
            StepRecord(step, None, None, "train", 0.0, (ScalarBlock(names, STATISTICS, values),), ())
        )
        if step % 4 == 3:
            writer.flush()
    (path,) = (path for path in folder.rglob("scalars-*") if "_4-7" in path.name)
    content = bytearray(path.read_bytes())
    head = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + head])
    for name, entry in entries.items():
        if name.endswith(".values"):
            content[8 + head + entry["data_offsets"][0]] ^= 1
    path.write_bytes(content)
    return folder


def test_without_a_word_it_is_an_error_that_names_the_file(torn: Path) -> None:
    run = tt.open(torn)
    for ask in (lambda: run.series("b:output", "mean"), lambda: run.matrix("mean"), run.table):
        with pytest.raises(RunCorruptError, match=r"scalars-.*_4-7.*partial=True"):
            ask()


def test_partial_gives_everything_else(torn: Path) -> None:
    run = tt.open(torn)
    series = run.series("a:output", "mean", partial=True)
    got = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    for step in (0, 1, 2, 3, 8, 9, 10, 11):
        assert got[step] == float(step)
    assert all(math.isnan(got[step]) for step in range(4, 8))
    _, steps, values = run.matrix("mean", sites=["a:output"], partial=True)
    for step, value in zip(steps.tolist(), values[0].tolist(), strict=True):
        assert value == float(step) or (4 <= step < 8 and math.isnan(value))
