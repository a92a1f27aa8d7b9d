"""Pack a run of many ranks: few files, and one fold over all ranks that most reads need instead of the ranks.

    <out>/launches.json                  which attempts of which ranks were one launch
          whole-0000/rank-.../...        the numbers of launch 0 folded over its ranks, as a recording of one rank
          ranks-00000-00063-….pack       the files of 64 ranks, unchanged (`store.format.pack`)

Sites, steps, series, matrices and tables are read from the fold; ranks are opened for tensors, placements and
``run.rank(k)``. The fold is made by the same reader that folds an unpacked run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunError
from torchtap.ranks.fold import RankFold, needed, way_of
from torchtap.ranks.launch_run import LaunchRun
from torchtap.ranks.launches import Launch
from torchtap.spi import RunWriter, ScalarBlock, StepRecord
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import LAUNCHES, attempt_folder, rank_folder
from torchtap.store.format.checksum import JSON_LIMIT, UNSEALED, is_sealed, load_json, seal
from torchtap.store.format.pack import copy_ranks, run_folder
from torchtap.store.read.numbers import AxesCache, Block
from torchtap.store.read.rank_run import RankRun

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["Packer", "attempt_of_whole", "fold_in_place", "groups_of", "packed_launches", "write_packed"]

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
    """Write a packed copy of a run of several ranks. Numbers are read group by group."""
    if run.recording:
        raise RunError(f"{run.path} is still being recorded: pack it when it has ended")
    run = type(run)(run.path)  # all ranks and attempts
    launches = [each.launch for each in run.launch_runs()]
    root = run_folder(run.path)
    packer = Packer(path, launches, run.launch_runs())
    for ranks in groups_of(run.ranks):
        packer.add(root, ranks)
    packer.finish()


def fold_in_place(run: Run) -> None:
    """Write the fold over all ranks of a recording that has ended beside it, so that most reads open no rank."""
    root = run_folder(run.path)
    packer = Packer(Path(run.path), [each.launch for each in run.launch_runs()], copied=False)
    for group in groups_of(run.ranks):
        packer.add(root, group)
    packer.finish()


def groups_of(ranks: Sequence[int], size: int = _RANKS_IN_A_PACK) -> list[list[int]]:
    """Return the ranks in groups without gaps."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1 and len(found[-1]) < size:
            found[-1].append(rank)
        else:
            found.append([rank])
    return found


@final
class Packer:
    """Pack the ranks of a run group by group. The memory does not grow with the number of ranks.

    Without ``copied``, only the fold and the list of launches are written, beside the recording that ``path`` is. They
    count until the next recording into this folder begins.

    ``whole`` are the launches as one reader sees them. They are read for what does not fold group by group: summands,
    unknown placements, metrics, quantiles. Without them such numbers are left out.
    """

    def __init__(
        self, path: Path, launches: Sequence[Launch], whole: Sequence[LaunchRun] = (), *, copied: bool = True
    ) -> None:
        path.mkdir(parents=True, exist_ok=not copied)
        self._path = path
        self._copied = copied
        self._launches = list(launches)
        self._whole = list(whole)
        self._folds = [GroupFold(launch) for launch in launches]

    def add(self, root: Folder, ranks: Sequence[int]) -> None:
        """Pack successive ranks and fold their numbers."""
        axes: AxesCache = {}
        for launch, fold in zip(self._launches, self._folds, strict=True):
            here = {rank: launch.attempts[rank] for rank in ranks if rank in launch.attempts}
            if here:
                opened = partial(_opened, root, axes)
                fold.add(LaunchRun(Launch(launch.world, launch.began, here), opened))
        if self._copied:
            copy_ranks(root, ranks, self._path)

    def finish(self) -> None:
        """Write the fold of each launch, and the list of launches, which makes the folder a packed run."""
        for number, fold in enumerate(self._folds):
            fold.write(self._path / whole_folder(number), self._whole[number] if self._whole else None)
        facts = [
            {"world": own.world, "began": float(own.began), "attempts": sorted(own.attempts.items())}
            for own in self._launches
        ]
        text = seal(json.dumps({"check": UNSEALED, "launches": facts}).encode())
        (self._path / LAUNCHES).write_bytes(text)


def _opened(root: Folder, axes: AxesCache, rank: int, attempt: int) -> RankRun:
    return RankRun(root, rank, attempt, axes)


@final
class GroupFold:
    """The fold of one launch, from those of groups of its ranks: rank, group, world.

    A site folds this way if its ranks hold shards, samples or replicas, and if groups hold either the same parts of it
    or different ones. All other sites are marked in ``_apart``.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._first: LaunchRun | None = None
        self._steps: dict[str, npt.NDArray[np.int64]] = {}  # by phase
        self._rows: dict[str, int] = {}  # by site
        self._parts: dict[str, list[frozenset[tuple[int, ...]]]] = {}  # by site: those that were folded
        self._apart: set[str] = set()
        self._folds: dict[tuple[str, str], RankFold] = {}  # by phase and statistic
        self._groups: dict[str, npt.NDArray[np.int64]] = {}  # by phase: how many groups count for a site
        self._statuses: dict[str, str] = {}
        self._problems: list[str] = []
        self._events: list[dict[str, Any]] = []

    def add(self, group: LaunchRun) -> None:
        """Fold one more group of ranks."""
        if self._first is None:
            self._first = group
            self._rows = {site: row for row, site in enumerate(group.holders())}
            clock = group.clock()
            self._steps = {phase: np.unique(clock.step[clock.phase == phase]) for phase in group.phases(None)}
            self._events = group.events()
        else:
            self._events += [
                {**event, "rank": run.rank}
                for run in group.ranks()
                for event in run.events()
                if event.get("kind") in ("lost", "warning")
            ]
        self._statuses |= {str(run.rank): run.status for run in group.ranks()}
        self._problems += [problem for run in group.ranks() for problem in run.problems]
        self._add_parts(group)

    def _add_parts(self, group: LaunchRun) -> None:
        new: set[str] = set()  # sites of which this group has parts that no other had
        for site in group.holders():
            parts = _parts_of(group, site)
            known = self._parts.setdefault(site, [])
            if (
                parts is None
                or site not in self._rows
                or any(each & parts for each in known if each != parts)
            ):
                self._apart.add(site)
            elif parts not in known:
                known.append(parts)
                new.add(site)
        for phase in group.phases(None):
            if phase not in self._steps or len(np.setdiff1d(group.steps(None, phase), self._steps[phase])):
                self._apart.update(self._rows)  # the first ranks lack a step
            elif new:
                self._fold(group, phase, [site for site in new if site not in self._apart])

    def _fold(self, group: LaunchRun, phase: str, sites: list[str]) -> None:
        steps, rows = self._steps[phase], [self._rows[site] for site in sites]
        shape = len(self._rows), len(steps)
        read: dict[str, npt.NDArray[np.float64]] = {}

        def column(statistic: str) -> npt.NDArray[np.float64]:
            if statistic not in read:
                read[statistic] = np.full(shape, np.nan)
                own = group.numbers(statistic, sites, phase, lenient=False).at(steps)
                read[statistic][rows] = np.where(own.there, own.values, np.nan)
            return read[statistic]

        for statistic in group.statistics(None):
            if (how := way_of(statistic)) != "own":
                fold = self._folds.setdefault((phase, statistic), RankFold(statistic, how, shape))
                names = needed(statistic)
                columns = {name: column(name) for name in names}
                if np.isnan(columns[names[0]]).all():  # kept without a count: its own presence decides
                    columns[names[0]] = column(statistic)
                fold.add(columns)
        self._groups.setdefault(phase, np.zeros((len(self._rows), 1), np.int64))[rows] += 1

    def _block(self, phase: str, statistic: str, whole: LaunchRun | None) -> Block:
        """Return a statistic of all sites over the launch."""
        sites, steps = list(self._rows), self._steps[phase]
        block = Block.empty(len(sites), steps)
        if (fold := self._folds.get((phase, statistic))) is not None:
            values, there = fold.result(np.maximum(self._groups[phase], 1))
            keep = np.array([[site not in self._apart] for site in sites])
            block = Block(steps, np.where(keep, values, np.nan), there & keep)
        rest = [row for row, site in enumerate(sites) if fold is None or site in self._apart]
        if whole is not None and rest:
            own = whole.numbers(statistic, [sites[row] for row in rest], phase, lenient=False).at(steps)
            block.values[rest], block.there[rest] = own.values, own.there
        return block

    def write(self, folder: Path, whole: LaunchRun | None) -> None:
        """Write the fold as a recording of one rank."""
        first = self._first
        if first is None:
            return
        if whole is not None and self._apart and not all(site in self._rows for site in whole.holders()):
            self._rows = {site: row for row, site in enumerate(whole.holders())}
            self._apart, self._folds = set(self._rows), {}
        lowest = first.lowest
        kept = {name: fact for name, fact in lowest.manifest.items() if name not in ("sites", "attempt")}
        problems = self._problems + ([] if whole is None else whole.missing())
        packed = {"statuses": self._statuses, "problems": problems}
        facts = list((whole or first).site_facts().values())
        manifest = {**kept, "sites": facts, "packed": packed}
        world = max(self._launch.world, 1)
        with RunWriter(folder, manifest=manifest, rank=lowest.rank, world=world) as writer:
            writer.update_manifest(launch=lowest.launch)
            for event in self._events:
                noted = {name: fact for name, fact in event.items() if name not in ("kind", "attempt")}
                writer.event(str(event.get("kind")), **noted)
            self._write_numbers(writer, whole or first, whole)
        for lock in folder.rglob("writer.lock"):
            lock.unlink()

    def _write_numbers(self, writer: RunWriter, launch: LaunchRun, whole: LaunchRun | None) -> None:
        clock, sites = launch.clock(), tuple(self._rows)
        for phase in launch.phases(None):
            rows = clock[clock.phase == phase]
            self._steps[phase] = np.unique(rows.step) if whole is not None else self._steps[phase]
            blocks = {
                statistic: self._block(phase, statistic, whole) for statistic in launch.statistics(None)
            }
            for column, row in zip(
                np.searchsorted(self._steps[phase], rows.step).tolist(), rows, strict=True
            ):
                scalars = tuple(
                    ScalarBlock(sites, (statistic,), block.values[:, [column]], block.there[:, column])
                    for statistic, block in blocks.items()
                    if block.there[:, column].any()
                )
                epoch, batch = (None if number < 0 else int(number) for number in (row.epoch, row.batch))
                writer.write(
                    StepRecord(
                        int(row.step), epoch, batch, phase, float(row.time), scalars, (), int(row.passes),
                        bool(row.skipped),
                    )
                )  # fmt: skip


def _parts_of(group: LaunchRun, site: str) -> frozenset[tuple[int, ...]] | None:
    """Return the places along divided axes that a group's ranks have; None if the site does not fold group by group."""
    found = set()
    for rank in group.holders()[site]:
        changes = {placement for _, _, placement in group.rank(rank).placements().get(site, [])}
        if len(changes) != 1:
            return None
        (placed,) = changes
        if placed.root or any(axis.share.kind in ("partial", "unknown") for axis in placed.axes):
            return None
        found.add(tuple(axis.at for axis in placed.axes if axis.share.divides))
    return frozenset(found)


def attempt_of_whole(root: Folder, number: int, launch: Launch) -> Folder | None:
    """Return the folder that holds the fold of a launch; None if there is none."""
    folder = root.child(whole_folder(number))
    inside = folder.child(rank_folder(min(launch.attempts))).child(attempt_folder(0))
    return folder if inside.names() else None
