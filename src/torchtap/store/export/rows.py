"""Exports with a row for each number."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchtap.errors import needing
from torchtap.sanitize import storable

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["write_csv", "write_dataset", "write_json_lines", "write_parquet"]


def write_parquet(run: Run, path: Path) -> None:
    """Columns run, step, epoch, batch, site, statistic, value: many runs can be queried as one table."""
    with needing("pyarrow", "arrow", who="export to parquet"):
        import pyarrow
        import pyarrow.parquet
    table = run.table().to_arrow()
    name = storable(Path(run.path.rstrip("/")).name)
    runs = pyarrow.DictionaryArray.from_arrays(np.zeros(table.num_rows, np.int32), [name])
    pyarrow.parquet.write_table(table.add_column(0, "run", runs), path)


def write_dataset(run: Run, path: Path) -> None:
    """A folder ``rank=<k>`` for each rank with its own numbers, as engines for large tables read partitions.

    One rank is in memory at a time.
    """
    for rank in run.ranks if run.shown_rank is None else [run.shown_rank]:
        folder = path / f"rank={rank}"
        folder.mkdir(parents=True)
        write_parquet(run.rank(rank), folder / "numbers.parquet")


def write_csv(run: Run, path: Path) -> None:
    """A header, then a row for each number; an epoch or a batch that was not set is empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "epoch", "batch", "phase", "site", "statistic", "value"))
        for step, epoch, batch, phase, site, statistic, value in run.table():
            unset = ("" if number == -1 else number for number in (epoch, batch))
            writer.writerow((step, *unset, storable(phase), storable(site), storable(statistic), repr(value)))


def write_json_lines(run: Run, path: Path) -> None:
    """An object for each number; what is not finite is the text ``"nan"``, ``"inf"`` or ``"-inf"``."""
    with path.open("w", encoding="utf-8") as file:
        for step, epoch, batch, phase, site, statistic, value in run.table():
            row = {
                "step": step,
                "epoch": None if epoch == -1 else epoch,
                "batch": None if batch == -1 else batch,
                "phase": storable(phase),
                "site": storable(site),
                "statistic": storable(statistic),
                "value": value if math.isfinite(value) else str(value),
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
