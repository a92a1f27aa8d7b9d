"""Exports with an array for each series and each tensor.

Tensors are read and written one after another. Where a format lacks an element type (bfloat16 and narrower in numpy and
HDF5) it is widened to float32, which loses nothing.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchtap.errors import needing
from torchtap.sanitize import file_component, shown
from torchtap.store.read.results import Series, TensorRef

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

_NUMBERS = ("step", "epoch", "batch", "time", "passes", "skipped")

__all__ = ["write_hdf5", "write_npz", "write_pt"]

_LONGEST_ATTRIBUTE = 8000  # letters: HDF5 has room for 64 KiB in all attributes of a group


def _series(run: Run) -> Iterator[tuple[str, str, Series]]:
    for site in run.sites():
        for statistic in run.statistics(site):
            for phase in run.phases:
                found = run.series(site, statistic, phase)
                if len(found.steps):
                    yield _labelled(run, site, phase), statistic, found


def _tensors(run: Run) -> Iterator[tuple[str, TensorRef]]:
    """Each tensor once with its label, also where a step has several of one name: the first counts."""
    seen = set()
    for phase in run.phases:
        for ref in run.tensors(phase=phase):
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
        "manifest": json.loads(json.dumps(run.manifest)),
        "clock": {
            **{name: torch.from_numpy(clock[name].copy()) for name in _NUMBERS},
            "phase": [str(phase) for phase in clock["phase"]],
        },
        "series": series,
        "tensors": tensors,
    }
    torch.save(whole, path)
