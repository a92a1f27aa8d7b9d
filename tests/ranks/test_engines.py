"""Recordings of many ranks in the hands of engines for large tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.optional import need

import torchtap as tt
from torchtap.errors import RunError
from torchtap.sinks.export import export_run
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

duckdb = need("duckdb")

RANKS, STEPS = 4, 50
SITES = tuple(f"blocks.{number}:output" for number in range(10))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tt.Run:
    folder = tmp_path_factory.mktemp("engines") / "run"
    for rank in range(RANKS):
        with RunWriter(folder, manifest={}, rank=rank, world=RANKS) as writer:
            for step in range(STEPS):
                values = np.array([[100.0, rank + step / 100 + site] for site in range(len(SITES))])
                blocks = (ScalarBlock(SITES, ("count", "std"), values),)
                writer.write(StepRecord(step, None, None, "train", float(step), blocks, ()))
    return tt.open(folder)


def test_a_dataset_is_queried_by_rank_with_duckdb(run: tt.Run, tmp_path: Path) -> None:
    target = export_run(run, "dataset", tmp_path / "numbers")
    rows = duckdb.sql(
        f"select rank, count(*), max(value) from read_parquet('{target}/*/*.parquet', hive_partitioning=true) "
        "where site = 'blocks.3:output' and statistic = 'std' group by rank order by rank"
    ).fetchall()
    expected = [
        (rank, STEPS, run.rank(rank).series("blocks.3:output", "std").values.max()) for rank in range(RANKS)
    ]
    assert rows == expected


def test_a_dataset_is_read_by_dask_as_one_frame(run: tt.Run, tmp_path: Path) -> None:
    dask = need("dask.dataframe")
    target = export_run(run, "dataset", tmp_path / "numbers")
    frame = dask.read_parquet(target)
    chosen = frame[(frame.statistic == "std") & (frame.site == "blocks.0:output")]
    means = chosen.groupby("rank", observed=True)["value"].mean().compute()
    for rank in range(RANKS):
        own = run.rank(rank).series("blocks.0:output", "std").values.mean()
        assert means[next(key for key in means.index if int(key) == rank)] == pytest.approx(own)


def test_a_folder_that_is_there_is_not_written_into(run: tt.Run, tmp_path: Path) -> None:
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "mine").touch()
    with pytest.raises(RunError, match="is there already"):
        export_run(run, "dataset", tmp_path / "numbers")
    assert [path.name for path in tmp_path.iterdir()] == ["numbers"]
