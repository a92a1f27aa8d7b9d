"""Pack a run of many ranks: few files, and one fold over all ranks that most reads need instead of the ranks.

    <out>/launches.json                  which attempts of which ranks were one launch
          whole-0000/rank-.../...        the numbers of launch 0 folded over its ranks, as a recording of one rank
          ranks-00000-00063.pack         the files of 64 ranks, unchanged (`store.read.packs`)

Sites, steps, series, matrices and tables are read from the fold; ranks are opened for tensors, placements and
``run.rank(k)``. The fold is made by the same reader that folds an unpacked run.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtap.errors import RunError
from torchtap.ranks.launch_run import LaunchRun
from torchtap.ranks.launches import Launch
from torchtap.spi import RunWriter, ScalarBlock, StepRecord
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import attempt_folder, rank_folder
from torchtap.store.format.checksum import JSON_LIMIT, UNSEALED, is_sealed, load_json, seal
from torchtap.store.read.packs import run_folder, write_pack

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["attempt_of_whole", "packed_launches", "write_packed"]

LAUNCHES = "launches.json"
_RANKS_IN_A_PACK = 64


def whole_folder(number: int) -> str:
    """Return the name of the folder with the fold of a launch."""
    return f"whole-{number:04d}"


def packed_launches(folder: Folder) -> list[Launch] | None:
    """Return the launches that a packed run lists; None if this is not a packed run."""
    with suppress(OSError, RunError), folder.open(LAUNCHES) as opened:
        if opened.size <= JSON_LIMIT:
            text = opened.read(0, opened.size)
            found = load_json(text) if is_sealed(text) else None
            listed = found.get("launches") if isinstance(found, dict) else None
            if isinstance(listed, list) and listed:
                return [_launch(each) for each in listed]
    return None


def _launch(facts: Any) -> Launch:
    match facts:
        case {"world": int(world), "began": float(began), "attempts": list(attempts)}:
            pairs = [(each[0], each[1]) for each in attempts if isinstance(each, list) and len(each) == 2]
            if pairs and all(type(number) is int and number >= 0 for pair in pairs for number in pair):
                return Launch(world, began, dict(pairs))
    raise RunError(f"{LAUNCHES} does not list launches")


def write_packed(run: Run, path: Path) -> None:
    """Write a packed copy of a run of several ranks."""
    from torchtap.ranks.recording import Recording

    if run.recording:
        raise RunError(f"{run.path} is still being recorded: pack it when it has ended")
    root = run_folder(run.path)
    recording = Recording(root, run.path, run.ranks)
    path.mkdir(parents=True)
    facts = []
    for number, launch in enumerate(recording.launches):
        _write_whole(path / whole_folder(number), launch)
        own = launch.launch
        facts.append(
            {"world": own.world, "began": float(own.began), "attempts": sorted(own.attempts.items())}
        )
    for ranks in _groups(run.ranks):
        files = []
        for rank in ranks:
            folder = root.child(rank_folder(rank))
            for attempt in folder.names():
                inside = folder.child(attempt)
                files += [
                    (f"{rank_folder(rank)}/{attempt}/{name}", inside, name) for name in sorted(inside.names())
                ]
        write_pack(path, ranks[0], ranks[-1], files)
    (path / LAUNCHES).write_bytes(seal(json.dumps({"check": UNSEALED, "launches": facts}).encode()))


def _groups(ranks: list[int]) -> list[list[int]]:
    """Return the ranks in groups without gaps."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1 and len(found[-1]) < _RANKS_IN_A_PACK:
            found[-1].append(rank)
        else:
            found.append([rank])
    return found


def _write_whole(folder: Path, launch: LaunchRun) -> None:
    """Write the fold of a launch as a recording of one rank."""
    lowest = launch.lowest
    kept = {name: fact for name, fact in lowest.manifest.items() if name not in ("sites", "attempt")}
    packed = {
        "statuses": {str(run.rank): run.status for run in launch.ranks()},
        "problems": launch.problems(),
    }
    manifest = {**kept, "sites": list(launch.site_facts().values()), "packed": packed}
    with RunWriter(folder, manifest=manifest, rank=lowest.rank, world=max(launch.launch.world, 1)) as writer:
        writer.update_manifest(launch=lowest.launch)
        for event in launch.events():
            facts = {name: fact for name, fact in event.items() if name not in ("kind", "attempt")}
            writer.event(str(event.get("kind")), **facts)
        sites = list(launch.holders())
        clock = launch.clock()
        for phase in launch.phases(None):
            rows = clock[clock.phase == phase]
            blocks = {
                statistic: launch.numbers(statistic, sites, phase, lenient=False).at(np.unique(rows.step))
                for statistic in launch.statistics(None)
            }
            for column, row in zip(
                np.searchsorted(np.unique(rows.step), rows.step).tolist(), rows, strict=True
            ):
                scalars = tuple(
                    ScalarBlock(
                        tuple(sites),
                        (statistic,),
                        block.values[:, column : column + 1],
                        block.there[:, column],
                    )
                    for statistic, block in blocks.items()
                    if block.there[:, column].any()
                )
                writer.write(
                    StepRecord(
                        int(row.step),
                        None if row.epoch < 0 else int(row.epoch),
                        None if row.batch < 0 else int(row.batch),
                        phase,
                        float(row.time),
                        scalars,
                        (),
                        int(row.passes),
                        bool(row.skipped),
                    )
                )
    for lock in folder.rglob("writer.lock"):
        lock.unlink()


def attempt_of_whole(root: Folder, number: int, launch: Launch) -> Folder | None:
    """Return the folder that holds the fold of a launch; None if there is none."""
    folder = root.child(whole_folder(number))
    inside = folder.child(rank_folder(min(launch.attempts))).child(attempt_folder(0))
    return folder if inside.names() else None
