"""Write a run in a format that other tools read: one function, one small file behind it for each format.

| to        | what it holds                                              | extra     |
| --------- | ---------------------------------------------------------- | --------- |
| `parquet` | every number, one a row, with the run's name as a column    | `arrow`   |
| `dataset` | a folder of parquet files, one for each rank: its own numbers | `arrow` |
| `csv`     | every number, one a row                                     |           |
| `jsonl`   | every number, one JSON object a row                         |           |
| `hdf5`    | a series for each site and statistic, and every tensor      | `hdf5`    |
| `npz`     | the same, under flat names                                  |           |
| `pt`      | the same as tensors; loads with `weights_only=True`         |           |

The file, or the folder, appears whole: it is written under a temporary name first.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchtap.errors import RunError
from torchtap.registry import imported

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["FORMATS", "export_run"]

FORMATS = {
    "parquet": "torchtap.store.export.rows:write_parquet",
    "dataset": "torchtap.store.export.rows:write_dataset",
    "csv": "torchtap.store.export.rows:write_csv",
    "jsonl": "torchtap.store.export.rows:write_json_lines",
    "hdf5": "torchtap.store.export.arrays:write_hdf5",
    "npz": "torchtap.store.export.arrays:write_npz",
    "pt": "torchtap.store.export.arrays:write_pt",
}


def export_run(run: Run, to: str, path: str | os.PathLike[str]) -> Path:
    """Write ``run`` to ``path`` in the format called ``to``. Returns the path."""
    if to not in FORMATS:
        raise RunError(f"there is no export to {to!r}; there is one to {', '.join(FORMATS)}")
    write: Callable[[Run, Path], None] = imported(FORMATS[to])
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # with a suffix in any case: some of the writers go by it, and torch names its archive after what is before it
    temporary = target.with_name(f".tmp-{os.getpid()}{target.suffix or f'.{to}'}")
    try:
        write(run, temporary)
        if (
            temporary.is_dir()
            and target.is_dir()
            and all(p.name.startswith("rank=") for p in target.iterdir())
        ):
            shutil.rmtree(target)  # an older dataset; a folder with anything else in it stays
        os.replace(temporary, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise RunError(f"{target} is there already, and is not empty") from error
        raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)
    return target
