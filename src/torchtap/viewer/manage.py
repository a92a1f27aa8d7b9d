"""Change runs: rename, tag, archive, delete, copy, merge. For `torchtap runs`, and for a page with ``--manage``.

Guarantees, each held by a test:
- a page changes only runs inside a folder of runs that was given; a run that was named itself is never touched;
- nothing outside that folder, whatever the name and wherever a link leads: no link is written through;
- never a run that is being written;
- a copy or a merged run appears whole or not at all;
- tags and the archived mark go into a file of their own: recorded files do not change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torchtap.progress import count, tracked
from torchtap.sanitize import replace_file
from torchtap.spi import RunWriter, ScalarBlock, StepRecord, TensorItem
from torchtap.viewer.open_run import Refused
from torchtap.viewer.run_index import NOTES, Catalog, is_run, read_notes, short_text

if TYPE_CHECKING:
    from torchtap import Run

__all__ = [
    "archive_run",
    "copy_run",
    "delete_run",
    "manage",
    "merge_runs",
    "rename_run",
    "run_folder",
    "tag_run",
]

_NAME = re.compile(r"[\w][\w .+=@,~-]{0,120}")


def manage(catalog: Catalog, asked: Any) -> dict[str, Any]:
    """Do the requested ``action`` with ``value`` on ``run``. Return the run's name afterwards."""
    if not isinstance(asked, Mapping) or not isinstance(asked.get("run"), str):
        raise Refused("which run? ask with 'run' and 'action'")
    action = _ACTIONS.get(str(asked.get("action")))
    if action is None:
        raise Refused(f"unknown action {short_text(asked.get('action'), 40)!r}; known: {', '.join(_ACTIONS)}")
    name = asked["run"]
    path = _own_folder(catalog, name)
    fresh = action(path, asked.get("value"))
    catalog.forget(name)
    return {"run": name if fresh is None else fresh}


def _own_folder(catalog: Catalog, name: str) -> Path:
    found = catalog.place(name)
    if found.root is None:
        raise Refused("only runs inside a folder of runs can be changed: torchtap view FOLDER --manage", 403)
    path = Path(found.path)
    resolved = path.resolve()
    if path.is_symlink() or resolved == found.root or not resolved.is_relative_to(found.root):
        raise Refused(f"the run {name[:200]!r} lies outside of the folder that was opened", 403)
    return resolved


def _refuse_while_written(path: Path) -> None:
    from torchtap import open as open_run

    if open_run(path).status == "recording":
        raise Refused("the run is still being written; wait until it has ended", 409)


def rename_run(path: Path, value: object) -> str:
    """Rename a run's folder. Return the new name."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in (".", ".."):
        raise Refused(
            f"{short_text(value, 60)!r} is no name for a folder; use letters, digits, spaces and . + = @ , ~ -"
        )
    _refuse_while_written(path)
    target = path.parent / value
    if target.exists() or target.is_symlink():
        raise Refused(f"there is already something called {value!r}", 409)
    os.rename(path, target)
    return value


def tag_run(path: Path, value: object) -> None:
    """Replace the tags of a run."""
    if not isinstance(value, list) or not all(isinstance(tag, str) for tag in value):
        raise Refused("tags are a list of words")
    tags = list(dict.fromkeys(tag.strip()[:60] for tag in value if tag.strip()))[:40]
    _note(path, tags, read_notes(str(path))[1])


def archive_run(path: Path, value: object) -> None:
    """Set or remove the archived mark."""
    if not isinstance(value, bool):
        raise Refused("archive: yes or no")
    _note(path, read_notes(str(path))[0], value)


def _note(path: Path, tags: list[str], archived: bool) -> None:
    replace_file(path / NOTES, json.dumps({"tags": tags, "archived": archived}).encode("utf-8"))


def delete_run(path: Path, value: object) -> None:
    """Delete a run; ``value`` must repeat the folder's name."""
    if value != path.name:
        raise Refused("to delete a run, repeat the name of its folder")
    _refuse_while_written(path)
    shutil.rmtree(path)


_ACTIONS: dict[str, Callable[[Path, object], str | None]] = {
    "rename": rename_run,
    "tag": tag_run,
    "archive": archive_run,
    "delete": delete_run,
}


def run_folder(path: str) -> Path:
    """Return the folder of a run on this machine. Links and other folders are refused."""
    place = Path(path)
    if "://" in path:
        raise Refused(f"{path} is in an object store; only runs on this machine can be changed")
    if place.is_symlink():
        raise Refused(f"{path} is a link; name the run itself")
    if not place.is_dir() or not is_run(os.listdir(place)):
        raise Refused(f"there is no run at {path}")
    return place.resolve()


def copy_run(path: Path, target: Path) -> None:
    """Copy a run to ``target``, which must not exist."""
    _refuse_while_written(path)
    with _appearing(target) as fresh:
        shutil.copytree(path, fresh, symlinks=True, copy_function=_copied)


def _copied(source: str, target: str) -> None:
    count("copying files")
    shutil.copy2(source, target, follow_symlinks=False)


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes ``target`` at the end of the block, and is removed on an error."""
    if target.exists() or target.is_symlink():
        raise Refused(f"there is already something at {target}", 409)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".tmp-{os.getpid()}-{target.name}")
    try:
        yield fresh
        os.replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def merge_runs(paths: Sequence[Path], target: Path) -> None:
    """Write one run from several: ranks that wrote into different folders, or a run and its resumption.

    A rank that several of them have becomes one attempt for each, in the order given; where two recorded the same step,
    the later counts.
    """
    from torchtap import open as open_run

    runs = [open_run(path) for path in paths]
    if any(run.status == "recording" for run in runs):
        raise Refused("one of the runs is still being written; wait until it has ended", 409)
    ranks = [rank for run in runs for rank in run.ranks]
    with _appearing(target) as fresh:
        if len(set(ranks)) == len(ranks):
            for path in paths:
                shutil.copytree(path, fresh, symlinks=True, dirs_exist_ok=True, copy_function=_copied)
        else:
            for run, rank in ((each, rank) for each in runs for rank in each.ranks):
                _append(run.rank(rank) if len(run.ranks) > 1 else run, rank, fresh)
        tags = [tag for path in paths for tag in read_notes(str(path))[0]]
        if tags:
            _note(fresh, list(dict.fromkeys(tags)), False)


_OWN = ("check", "format", "rank", "world", "attempt", "launch", "run_id")  # fields that the writer sets


def _append(run: Run, rank: int, folder: Path) -> None:
    """Write everything that one rank recorded as a further attempt."""
    manifest = {key: value for key, value in run.manifest.items() if key not in _OWN}
    world = run.manifest.get("world")
    with RunWriter(
        folder, manifest=manifest, rank=rank, world=world if isinstance(world, int) else 1
    ) as writer:
        for event in run.events():
            writer.event(str(event["kind"]), **{key: value for key, value in event.items() if key != "kind"})
        for record in tracked(_records(run), f"merging rank {rank}", len(run.clock())):
            writer.write(record)


def _records(run: Run) -> Iterator[StepRecord]:
    """Yield what a run recorded, record by record, in the order of its clock."""
    table = run.table()
    references: dict[tuple[int, str], list[Any]] = {}
    for phase in run.phases:
        for reference in run.tensors(phase=phase):
            references.setdefault((int(reference.step), phase), []).append(reference)
    order = np.lexsort((table.phase_codes, table.step))
    keys = np.stack([table.step[order], table.phase_codes[order]])
    starts = np.flatnonzero(np.r_[len(order) > 0, (np.diff(keys, axis=1) != 0).any(axis=0)])
    rows = {
        (int(keys[0, start]), table.phase_names[keys[1, start]]): part
        for start, part in zip(starts, np.split(order, starts[1:]), strict=False)
    }
    for moment in run.clock():
        step, phase = int(moment["step"]), str(moment["phase"])
        items = [
            TensorItem(ref.site, ref.field, ref.reduction, run.tensor(ref.site, step, ref.field, phase=phase))
            for ref in references.get((step, phase), ())
        ]
        yield StepRecord(
            step,
            None if moment["epoch"] < 0 else int(moment["epoch"]),
            None if moment["batch"] < 0 else int(moment["batch"]),
            phase,
            float(moment["time"]),
            tuple(_blocks(table, rows.get((step, phase), np.zeros(0, np.int64)))),
            tuple(items),
            int(moment["passes"]),
            bool(moment["skipped"]),
        )


def _blocks(table: Any, rows: npt.NDArray[np.int64]) -> Iterator[ScalarBlock]:
    """Yield the numbers of one record as grids: sites with the same statistics in one."""
    held: dict[str, dict[str, float]] = {}
    for row in rows.tolist():
        site = held.setdefault(table.site_names[table.site_codes[row]], {})
        site[table.statistic_names[table.statistic_codes[row]]] = float(table.value[row])
    grids: dict[tuple[str, ...], list[str]] = {}
    for name, numbers in held.items():
        grids.setdefault(tuple(numbers), []).append(name)
    for statistics, sites in grids.items():
        values = np.array([[held[site][statistic] for statistic in statistics] for site in sites])
        yield ScalarBlock(tuple(sites), statistics, values)
