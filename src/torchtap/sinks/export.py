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
| `packed`  | the run itself, in few files and folded over its ranks      |           |

The file, or the folder, appears whole: it is written under a temporary name first.

Exports with a row for each number.

Exports with an array for each series and each tensor.

Tensors are read and written one after another. Where a format lacks an element type (bfloat16 and narrower in numpy and
HDF5) it is widened to float32, which loses nothing.
"""

from __future__ import annotations

import copy
import csv
import errno
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtap.errors import RunError, needing
from torchtap.progress import tracked
from torchtap.registry import imported
from torchtap.sanitize import file_component, shown, storable

if TYPE_CHECKING:
    from torchtap import Run

__all__ = [
    "FORMATS",
    "export_run",
    "write_csv",
    "write_dataset",
    "write_hdf5",
    "write_json_lines",
    "write_npz",
    "write_parquet",
    "write_pt",
]


FORMATS = {
    "parquet": "torchtap.sinks.export:write_parquet",
    "dataset": "torchtap.sinks.export:write_dataset",
    "csv": "torchtap.sinks.export:write_csv",
    "jsonl": "torchtap.sinks.export:write_json_lines",
    "hdf5": "torchtap.sinks.export:write_hdf5",
    "npz": "torchtap.sinks.export:write_npz",
    "pt": "torchtap.sinks.export:write_pt",
    "packed": "torchtap.ranks.packed:write_packed",
}


_OURS = ("rank=", "ranks-", "whole-", "launches.json")  # in a folder that an export made


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
        if temporary.is_dir() and target.is_dir() and all(p.name.startswith(_OURS) for p in target.iterdir()):
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


_NUMBERS = ("step", "epoch", "batch", "time", "passes", "skipped")


_LONGEST_ATTRIBUTE = 8000  # letters: HDF5 has room for 64 KiB in all attributes of a group


def _series(run: Run) -> Iterator[tuple[str, str, Any]]:
    for site in tracked(run.sites(), "writing series"):
        for statistic in run.statistics(site):
            for phase in run.phases:
                found = run.series(site, statistic, phase)
                if len(found.steps):
                    yield _labelled(run, site, phase), statistic, found


def _tensors(run: Run) -> Iterator[tuple[str, Any]]:
    """Each tensor once with its label, also where a step has several of one name: the first counts."""
    seen = set()
    for phase in run.phases:
        for ref in tracked(run.tensors(phase=phase), "writing tensors"):
            key = (ref.site, ref.step, ref.field, ref.reduction, phase)
            if key not in seen:
                seen.add(key)
                yield _labelled(run, ref.site, phase), ref


def _labelled(run: Run, site: str, phase: str) -> str:
    """A site's name; in another phase than the one it is shown in by itself, with that phase."""
    return site if phase == run.phase_of(site) else f"{site}@{phase}"


def write_hdf5(run: Run, path: Path) -> None:
    """``/series/<site>/<statistic>/{steps,values}``, ``/tensors/<site>/<field>/<step>``, ``/clock``, ``/manifest``.

    Names are written as `file_component` does; a group's attribute ``name`` has the site's own.
    """
    with needing("h5py", "hdf5", who="export to hdf5"):
        import h5py
    with h5py.File(path, "w") as file:
        file["manifest"] = json.dumps(run.manifest)
        clock = run.clock()
        for name in _NUMBERS:
            file[f"clock/{name}"] = clock[name]
        file["clock/phase"] = [shown(str(phase)) for phase in clock["phase"]]
        for site, statistic, series in _series(run):
            group = f"series/{file_component(site)}/{file_component(statistic)}"
            if group not in file:
                file[f"{group}/steps"], file[f"{group}/values"] = series
                file[f"series/{file_component(site)}"].attrs["name"] = shown(site, _LONGEST_ATTRIBUTE)
        for label, ref in _tensors(run):
            array = run.array(ref.site, ref.step, ref.field, reduction=ref.reduction, phase=ref.phase)
            name = f"tensors/{file_component(label)}/{file_component(ref.field)}/{ref.step}"
            if name not in file:
                file[name] = array
                file[name].attrs["dtype"] = ref.dtype


def write_npz(run: Run, path: Path) -> None:
    """``series|<site>|<statistic>|steps`` and ``|values``, ``tensors|<site>|<field>|<step>``, ``clock|<column>``.

    Names are written as `file_component` does.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        taken: set[str] = set()

        def add(name: str, array: np.ndarray) -> None:
            if name not in taken:
                taken.add(name)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)

        clock = run.clock()
        for column in (*_NUMBERS, "phase"):
            add(f"clock|{column}", np.asarray(clock[column]))
        for site, statistic, series in _series(run):
            add(f"series|{file_component(site)}|{file_component(statistic)}|steps", series.steps)
            add(f"series|{file_component(site)}|{file_component(statistic)}|values", series.values)
        for label, ref in _tensors(run):
            array = run.array(ref.site, ref.step, ref.field, reduction=ref.reduction, phase=ref.phase)
            add(f"tensors|{file_component(label)}|{file_component(ref.field)}|{ref.step}", array)


def write_pt(run: Run, path: Path) -> None:
    """``{"manifest", "clock", "series": {site: {statistic: {"steps", "values"}}}, "tensors": {site: {step: ...}}}``.

    Only tensors, numbers, text, lists and dicts, so that ``torch.load(..., weights_only=True)`` reads it.
    """
    import torch

    clock = run.clock()
    series: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for site, statistic, found in _series(run):
        steps, values = torch.from_numpy(found.steps.copy()), torch.from_numpy(found.values.copy())
        series.setdefault(site, {})[statistic] = {"steps": steps, "values": values}
    tensors: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for label, ref in _tensors(run):
        value = run.tensor(ref.site, ref.step, ref.field, reduction=ref.reduction, phase=ref.phase)
        tensors.setdefault(label, {}).setdefault(ref.step, {}).setdefault(ref.field, value)
    whole = {
        "manifest": copy.deepcopy(run.manifest),
        "clock": {
            **{name: torch.from_numpy(clock[name].copy()) for name in _NUMBERS},
            "phase": [str(phase) for phase in clock["phase"]],
        },
        "series": series,
        "tensors": tensors,
    }
    torch.save(whole, path)
