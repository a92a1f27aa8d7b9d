"""All launches of a run in turn, of one rank or of all: the only place where launches and ranks are put together.

A step that a later launch recorded again belongs to the later one, on every rank. If its records there are damaged, an
earlier launch still has values of that step, but they are not what the run ended with: reading them raises an error, or
gives NaN with ``partial``. Attempts that two processes wrote at the same time, both as the same rank, are not mixed:
the first one is shown, and a problem names the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError, RunFormatError
from torchtap.placement import Placement
from torchtap.ranks.launch_run import LaunchRun
from torchtap.ranks.launches import Launch, find_launches
from torchtap.ranks.packed import attempt_of_whole, packed_launches
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import parse_attempt, rank_folder
from torchtap.store.read.lookup import TRAINING, first_phase
from torchtap.store.read.numbers import AxesCache, Block
from torchtap.store.read.rank_run import RankRun
from torchtap.store.read.results import FoundTensor, Status, Table, TensorRef

__all__ = ["Recording"]

Ranges = Sequence[tuple[int, int]]
Steps = npt.NDArray[np.int64]


@final
class Recording:
    """The launches of a run. Sites, statistics and phases that it does not have give empty answers."""

    def __init__(
        self,
        root: Folder,
        path: str,
        ranks: Sequence[int],
        *,
        attempt: int | None = None,
        phase: str | None = None,
        partial: bool = False,
    ) -> None:
        self.path = path
        self._root = root
        self._ranks = list(ranks)
        self._attempt = attempt
        self._phase = phase
        self._partial = partial
        self._axes: AxesCache = {}
        self._opened: dict[tuple[int, int], RankRun] = {}
        self._owned: list[Steps] | None = None
        self.launches: list[LaunchRun] = []
        self._aside: list[RankRun] = []  # written while another attempt of the same rank was
        self.refresh()

    # --- launches -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what was written since."""
        known = {tuple(run.launch.attempts.items()): run for run in self.launches}
        self.launches, self._owned = [], None
        for number, launch in enumerate(self._find_launches()):
            before = known.get(tuple(launch.attempts.items()))
            if before is not None:
                before.launch = launch
                before.refresh()
            self.launches.append(before or LaunchRun(launch, self._open, self._fold_of(number, launch)))
        if len(self._ranks) == 1:
            self._set_aside()

    def _find_launches(self) -> list[Launch]:
        if len(self._ranks) > 1:
            found = packed_launches(self._root) or find_launches(self._root, self._ranks)
            if not found:
                raise RunFormatError(f"{self.path}: no rank has an attempt")
            return found
        (rank,) = self._ranks
        names = self._root.child(rank_folder(rank)).names()
        attempts = sorted(number for name in names if (number := parse_attempt(name)) is not None)
        if self._attempt is not None:
            attempts = [attempt for attempt in attempts if attempt == self._attempt]
        if not attempts:
            wanted = "attempt" if self._attempt is None else f"attempt {self._attempt}"
            raise RunFormatError(f"{self.path}: rank {rank} has no {wanted}")
        return [Launch(1, 0.0, {rank: attempt}) for attempt in attempts]

    def _fold_of(self, number: int, launch: Launch) -> RankRun | None:
        """Return the fold of a launch of a packed run; None if there is none."""
        folder = attempt_of_whole(self._root, number, launch) if len(self._ranks) > 1 else None
        if folder is None:
            return None
        return RankRun(folder, min(launch.attempts), 0, self._axes, phase=self._phase)

    def _open(self, rank: int, attempt: int) -> RankRun:
        if (rank, attempt) not in self._opened:
            self._opened[rank, attempt] = RankRun(self._root, rank, attempt, self._axes, phase=self._phase)
        return self._opened[rank, attempt]

    def _set_aside(self) -> None:
        """Set aside the attempts that another process wrote at the same time as an earlier one."""
        kept: list[LaunchRun] = []
        self._aside = []
        for launch in self.launches:
            own = launch.lowest  # opened now, so that a folder that is no run fails when it is opened
            if any(_overlap(earlier.lowest, own) for earlier in kept):
                self._aside.append(own)
            else:
                kept.append(launch)
        self.launches = kept

    @property
    def _last(self) -> LaunchRun:
        return self.launches[-1]

    def follow(self, poll: float) -> Iterator[int]:
        """Yield each step of the lowest rank as it becomes visible, until the recording has ended."""
        seen: dict[tuple[int, int], int] = {}
        while True:
            ended = self._last.lowest.status != "recording"  # read first, so that no later step is missed
            self.refresh()
            previous = None
            for launch in self.launches:
                run = launch.lowest
                key = run.rank, run.attempt
                steps = run.recorded_steps(seen.get(key, 0)).tolist()
                seen[key] = seen.get(key, 0) + len(steps)
                for step in steps:
                    if step != previous:
                        yield step
                    previous = step
            if ended:
                return
            time.sleep(poll)

    def _in_turn(self) -> Iterator[tuple[LaunchRun, Steps | None, Ranges]]:
        """Yield each launch with the steps that it owns (None for all) and those that a later one has lost."""
        if len(self.launches) == 1:
            yield self._last, None, ()
            return
        if self._owned is None:
            later = np.zeros(0, np.int64)
            found: list[Steps] = []
            for launch in reversed(self.launches):
                own = launch.steps(None)
                found.append(np.setdiff1d(own, later))
                later = np.union1d(later, own)
            self._owned = found[::-1]
        lost: list[Ranges] = [()]
        for launch in reversed(self.launches[1:]):
            lost.append(_joined([*lost[-1], *launch.lost_steps()]))
        yield from zip(self.launches, self._owned, lost[::-1], strict=True)

    # --- the run ------------------------------------------------------------------------------------------

    @property
    def statuses(self) -> dict[int, Status]:
        return self._last.statuses()

    @property
    def status(self) -> Status:
        found = set(self.statuses.values())
        if "recording" in found:
            return "recording"
        return "interrupted" if "interrupted" in found else "closed"

    @property
    def manifest(self) -> dict[str, Any]:
        return next((found for run in reversed(self.launches) if (found := run.lowest.manifest)), {})

    @property
    def attempts(self) -> list[int]:
        here = {attempt for run in self.launches for attempt in run.launch.attempts.values()}
        return sorted(here | {run.attempt for run in self._aside})

    @property
    def phases(self) -> list[str]:
        phases = (phase for launch, own, _ in self._in_turn() for phase in launch.phases(own))
        return list(dict.fromkeys(phases))

    def phase_of(self, site: str) -> str:
        """Return the phase that a site is shown in by default: training if it was recorded then."""
        phases = self.phases
        if len(phases) <= 1:
            return phases[0] if phases else TRAINING
        recorded = {phase for launch in self.launches for phase in launch.phases_of(site)}
        return first_phase(phases, recorded)

    @property
    def problems(self) -> list[str]:
        found = [problem for launch in self.launches for problem in launch.problems()]
        beside = (
            f"rank {run.rank}, attempt {run.attempt}: it was written while another attempt was: two processes took "
            f"themselves for rank {run.rank}, because neither a process group nor RANK told them apart when they "
            f"were watched. tt.open(path, rank={run.rank}, attempt={run.attempt}) shows it"
            for run in self._aside
        )
        return [*found, *beside]

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the lowest rank of each launch; of the others, losses and warnings."""
        return [event for launch in self.launches for event in launch.events()]

    # --- sites and steps ----------------------------------------------------------------------------------

    def site_names(self) -> dict[str, None]:
        found: dict[str, None] = {}
        for launch in self.launches:
            found.update(launch.site_names())
        if len(self.launches) == 1:
            return found
        return dict.fromkeys([name for name in self.site_facts() if name in found] + list(found))

    def site_facts(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for launch in reversed(self.launches):
            for site, facts in launch.site_facts().items():
                if found.setdefault(site, facts).get("shape") is None:
                    found[site] = {**found[site], **facts}
        return found

    def placement(self, site: str, step: int | None, phase: str) -> Placement | None:
        if step is None:
            return self._last.placement(site, None, phase)
        return self._at(step).placement(site, step, phase)

    def is_whole(self, site: str, statistic: str, step: int | None, phase: str) -> bool:
        launch = self._last if step is None else self._at(step)
        return site not in launch.holders() or launch.is_whole(site, statistic, step, phase)

    def _at(self, step: int) -> LaunchRun:
        """Return the launch that owns a step."""
        owners = (launch for launch, own, _ in self._in_turn() if own is None or step in own)
        return next(owners, self._last)

    def statistics(self, site: str | None) -> list[str]:
        names = (name for launch in self.launches for name in launch.statistics(site))
        return list(dict.fromkeys(names))

    def steps(self, site: str | None) -> Steps:
        phase = None if site is None else self.phase_of(site)
        found = [np.zeros(0, np.int64)]
        for launch, own, _ in self._in_turn():
            steps = launch.steps(site, phase)
            found.append(steps if own is None else np.intersect1d(steps, own))
        return np.unique(np.concatenate(found))

    def clock(self) -> np.recarray:
        """Return the lowest rank's clock, with the records that only other ranks have."""
        rows: list[np.ndarray] = []
        for launch, own, _ in self._in_turn():
            clock = np.asarray(launch.clock())
            rows.append(clock if own is None else clock[np.isin(clock["step"], own)])
        table = np.concatenate(rows)
        return table[np.argsort(table["step"], kind="stable")].view(np.recarray)

    # --- numbers ------------------------------------------------------------------------------------------

    def numbers(
        self,
        statistic: str,
        sites: Sequence[str],
        phase_of: Callable[[str], str],
        *,
        steps: Steps | None = None,
        partial: bool,
    ) -> Block:
        """Read one statistic of some sites, each in its own phase, over the steps that each launch owns."""
        by_phase: dict[str, list[int]] = {}
        for row, site in enumerate(sites):
            by_phase.setdefault(phase_of(site), []).append(row)
        blocks = {
            phase: self._numbers(
                statistic, [sites[row] for row in rows], phase, partial or self._partial, steps
            )
            for phase, rows in by_phase.items()
        }
        if len(blocks) == 1:
            return next(iter(blocks.values()))
        every = np.unique(np.concatenate([np.zeros(0, np.int64), *(each.steps for each in blocks.values())]))
        whole = Block.empty(len(sites), every)
        for phase, rows in by_phase.items():
            own = blocks[phase].at(every)
            whole.values[rows], whole.there[rows] = own.values, own.there
        return whole

    def _numbers(
        self,
        statistic: str,
        sites: Sequence[str],
        phase: str,
        lenient: bool,
        steps: Steps | None = None,
    ) -> Block:
        blocks = []
        for launch, own, lost in self._in_turn():
            block = launch.numbers(statistic, sites, phase, steps=steps, lenient=lenient)
            if own is not None:
                block = block.kept(np.isin(block.steps, own))
            doubt = _inside(block.steps, lost)
            if doubt.any():
                if not lenient:
                    raise _doubt_about(block.steps[doubt])
                block = block._replace(values=np.where(doubt, np.nan, block.values))
            blocks.append(block)
        return Block.joined(len(sites), blocks)

    def table(self, sites: list[str], statistics: list[str], *, partial: bool) -> Table:
        """Read every number of these sites and statistics, by step."""
        clock, phases = np.asarray(self.clock()), self.phases or [TRAINING]
        empty = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        cells: list[tuple[np.ndarray, ...]] = [(*empty, np.zeros(0))]  # row of the clock, codes, value
        for code, phase in enumerate(phases):
            here = np.flatnonzero(clock["phase"] == phase)
            for kind, statistic in enumerate(statistics):
                found = self._numbers(statistic, sites, phase, partial or self._partial)
                columns, rows = np.nonzero(found.there.T)
                at = (
                    here[np.searchsorted(clock["step"][here], found.steps[columns])]
                    if len(columns)
                    else columns
                )
                cells.append(
                    (at, np.full(len(at), code), rows, np.full(len(at), kind), found.values[rows, columns])
                )
        at, codes, rows, kinds, values = (np.concatenate(column) for column in zip(*cells, strict=True))
        order = np.lexsort((kinds, rows, codes, clock["step"][at]))
        at = at[order]
        return Table(
            clock["step"][at],
            clock["epoch"][at],
            clock["batch"][at],
            codes[order].astype(np.int32),
            rows[order].astype(np.int32),
            kinds[order].astype(np.int32),
            values[order],
            phases,
            sites,
            statistics,
        )

    # --- tensors ------------------------------------------------------------------------------------------

    def tensors(self, site: str | None) -> list[TensorRef]:
        found: list[TensorRef] = []
        for launch, own, lost in self._in_turn():
            refs = launch.tensors(site)
            if own is not None:
                owned = set(own.tolist())
                refs = [ref for ref in refs if ref.step in owned]
            if self._partial and lost:
                doubt = _inside(np.array([ref.step for ref in refs], np.int64), lost)
                refs = [ref for ref, doubted in zip(refs, doubt.tolist(), strict=True) if not doubted]
            found += refs
        return found

    def find(
        self, site: str, step: int | None, field: str, reduction: str | None, phase: str
    ) -> FoundTensor | None:
        """Return a tensor; without ``step``, the one of the largest step."""
        best: tuple[int, FoundTensor, Ranges] | None = None
        for launch, own, lost in self._in_turn():
            if step is not None and own is not None and step not in own:
                continue
            found = launch.find(site, step, field, reduction, phase, gaps=self._partial, among=own)
            if found is not None:
                at = found.ref().step
                if best is None or at > best[0]:
                    best = at, found, lost
        if best is None:
            return None
        if _inside(np.array([best[0]]), best[2]).any():
            raise _doubt_about(np.array([best[0]]))
        return best[1]


def _overlap(run: RankRun, later: RankRun) -> bool:
    """Return True if a process on the same host still wrote to a run when another had recorded its first step."""
    one, other = run.clock(), later.clock()
    if not len(one) or not len(other) or one.time.max() <= other.time.min():
        return False
    by, of = run.launch, later.launch
    return bool(by) and by.get("host") == of.get("host") and by.get("pid") != of.get("pid")


def _inside(steps: Steps, ranges: Ranges) -> npt.NDArray[np.bool_]:
    """Return which steps lie in one of the ranges, which are ascending and do not overlap."""
    if not ranges or not len(steps):
        return np.zeros(len(steps), bool)
    lows = np.array([low for low, _ in ranges], np.int64)
    highs = np.array([high for _, high in ranges], np.int64)
    at = np.searchsorted(lows, steps, side="right") - 1
    found: npt.NDArray[np.bool_] = (at >= 0) & (steps <= highs[np.maximum(at, 0)])
    return found


def _joined(ranges: Ranges) -> list[tuple[int, int]]:
    """Return the same steps in ranges that do not overlap, ascending."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        elif low <= high:
            found.append((low, high))
    return found


def _doubt_about(steps: Steps) -> RunCorruptError:
    """Return the error for steps whose last records are damaged."""
    distinct = np.unique(steps)
    named = ", ".join(str(step) for step in distinct[:5].tolist())
    more = " ..." if len(distinct) > 5 else ""
    return RunCorruptError(
        f"a later attempt recorded step {named}{more} again, and its file is damaged or missing; an earlier attempt's "
        "values are there, but they are not what the run ended with. partial=True gives NaN for them, "
        "tt.open(path, attempt=...) shows one attempt alone, and run.problems names the files"
    )
