"""Open a run and read it, while it is being written or long after. Imports no torch.

It guarantees:
- only what is needed is read: a series reads its own bytes, a tensor its own;
- every value that is returned was verified against its checksum, or the read raises `RunCorruptError`;
- damaged, missing and lost values are listed in ``problems``; everything else stays readable;
- a step is visible whole or not at all, and stays visible.

A run that several ranks wrote is one: numbers are folded over ranks, tensors put together, replicas counted once.
`Run.rank` shows one rank. Launches follow one another: a step that a later launch recorded again belongs to the later
one, on every rank. If its records there are damaged, an earlier launch still has values of that step, but they are not
what the run ended with: reading them raises an error, or gives NaN with ``partial``. Attempts that two processes wrote
at the same time, both as the same rank, are not mixed: the first one is shown, and a problem names the others.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from torchtap.display import drawn
from torchtap.errors import RunCorruptError, RunFormatError, RunNotFoundError, SelectionError
from torchtap.placement import Placement
from torchtap.ranks.launch_run import LaunchRun, absent_ranks
from torchtap.ranks.launches import Launch, find_launches
from torchtap.ranks.packed import attempt_of_whole, packed_launches
from torchtap.store.files.folder import Folder, anchored, is_run, run_inside
from torchtap.store.files.layout import parse_attempt, parse_rank, rank_folder
from torchtap.store.format.pack import run_folder
from torchtap.store.read.lookup import (
    TRAINING,
    first_phase,
    in_order,
    no_such_phase,
    no_such_site,
    no_such_statistic,
    no_such_tensor,
    of_one_phase,
    only_statistic,
    run_text,
    spelled_out,
)
from torchtap.store.read.numbers import AxesCache, Block
from torchtap.store.read.rank_run import RankRun, steady
from torchtap.store.read.results import (
    FoundTensor,
    HistogramResult,
    Matrix,
    Series,
    Status,
    Table,
    TensorRef,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

T = TypeVar("T")
Ranges = Sequence[tuple[int, int]]
Steps = npt.NDArray[np.int64]

__all__ = ["Run", "is_run", "open", "open_run"]


def open_run(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    attempt: int | None = None,
    phase: str | None = None,
    partial: bool = False,
) -> Run:
    """Open a run folder on this machine or in an object store (``s3://...``).

    ``rank``, ``attempt`` and ``phase`` show one of each instead of all. An attempt is one rank's own: without
    ``rank``, the lowest one's. ``partial`` returns the readable rest of a damaged run instead of raising.
    """
    return Run(os.fspath(path), rank=rank, attempt=attempt, phase=phase, partial=partial)


open = open_run  # the front door's ``tt.open``


@final
class Run:
    """A recorded run. Made by `open_run`."""

    def __init__(
        self,
        path: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        phase: str | None = None,
        partial: bool = False,
        root: Folder | None = None,
    ) -> None:
        self.path = path = anchored(path)
        self._attempt = attempt
        self._phase = phase
        self._partial = partial
        self._root = run_folder(path) if root is None else root  # shared: the indexes of packs are read once
        self._ranks = _ranks_in(path, self._root.names(), rank)
        self._one_rank = rank is not None or attempt is not None
        # Whose recording is shown; None for that of all.
        self.shown_rank = rank
        if rank is None and (self._one_rank or len(self._ranks) == 1):
            self.shown_rank = self._ranks[0]
        self._axes: AxesCache = {}
        self._opened: dict[tuple[int, int], RankRun] = {}
        self._owned: list[Steps] | None = None
        self._names: dict[str, None] | None = None  # of all sites
        self._launches: list[LaunchRun] = []
        self._aside: list[RankRun] = []  # written while another attempt of the same rank was
        self.refresh()
        if phase is not None and phase not in self.phases:
            raise no_such_phase(path, phase, Run(path, rank=rank, attempt=attempt).phases)

    def __reduce__(self) -> tuple[Callable[[], Run], tuple[()]]:
        """Open the run again in another process."""
        again = functools.partial(
            Run,
            self.path,
            rank=self.shown_rank,
            attempt=self._attempt,
            phase=self._phase,
            partial=self._partial,
        )
        return again, ()

    # --- launches -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what was written since the run was opened or refreshed."""
        known = {tuple(run.launch.attempts.items()): run for run in self._launches}
        self._launches, self._owned, self._names = [], None, None
        for number, launch in enumerate(self._find_launches()):
            before = known.get(tuple(launch.attempts.items()))
            if before is not None:
                before.launch = launch
                before.refresh()
            self._launches.append(before or LaunchRun(launch, self._open, self._fold_of(number, launch)))
        if self.shown_rank is not None:
            self._set_aside()

    def _find_launches(self) -> list[Launch]:
        if self.shown_rank is None:
            found = packed_launches(self._root) or find_launches(self._root, self._ranks)
            if not found:
                raise RunFormatError(f"{self.path}: no rank has an attempt")
            self._ranks = sorted({rank for launch in found for rank in launch.attempts} or self._ranks)
            return found
        names = self._root.child(rank_folder(self.shown_rank)).names()
        attempts = sorted(number for name in names if (number := parse_attempt(name)) is not None)
        if self._attempt is not None:
            attempts = [attempt for attempt in attempts if attempt == self._attempt]
        if not attempts:
            wanted = "attempt" if self._attempt is None else f"attempt {self._attempt}"
            raise RunFormatError(f"{self.path}: rank {self.shown_rank} has no {wanted}")
        return [Launch(1, 0.0, {self.shown_rank: attempt}) for attempt in attempts]

    def _fold_of(self, number: int, launch: Launch) -> RankRun | None:
        """Return the fold of a launch of a packed run; None if there is none."""
        folder = attempt_of_whole(self._root, number, launch) if self.shown_rank is None else None
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
        for launch in self._launches:
            own = launch.lowest  # opened now, so that a folder that is no run fails when it is opened
            if any(_overlap(earlier.lowest, own) for earlier in kept):
                self._aside.append(own)
            else:
                kept.append(launch)
        self._launches = kept

    def launch_runs(self) -> list[LaunchRun]:
        """Return the recordings of the launches, oldest first."""
        return list(self._launches)

    @property
    def _last(self) -> LaunchRun:
        return self._launches[-1]

    def _in_turn(self) -> Iterator[tuple[LaunchRun, Steps | None, Ranges]]:
        """Yield each launch with the steps that it owns (None for all) and those that a later one has lost."""
        if len(self._launches) == 1:
            yield self._last, None, ()
            return
        if self._owned is None:
            later = np.zeros(0, np.int64)
            found: list[Steps] = []
            for launch in reversed(self._launches):
                own = launch.steps(None)
                found.append(np.setdiff1d(own, later))
                later = np.union1d(later, own)
            self._owned = found[::-1]
        lost: list[Ranges] = [()]
        for launch in reversed(self._launches[1:]):
            lost.append(_joined([*lost[-1], *launch.lost_steps()]))
        yield from zip(self._launches, self._owned, lost[::-1], strict=True)

    def _at(self, step: int | None) -> LaunchRun:
        """Return the launch that owns a step; the last one without a step."""
        turns = self._in_turn() if step is not None else ()
        return next((launch for launch, own, _ in turns if own is None or step in own), self._last)

    def follow(self, poll: float = 0.5) -> Iterator[int]:
        """Yield each step as it becomes visible, older ones first, until the recording has ended.

        Of several ranks the lowest one's steps.
        """
        seen: dict[tuple[int, int], int] = {}
        while True:
            ended = self._last.lowest.status != "recording"  # read first, so that no later step is missed
            self.refresh()
            previous = None
            for launch in self._launches:
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

    # --- the run as a whole -------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Return True if the last attempt was closed, on every rank."""
        return self.status == "closed"

    @property
    def recording(self) -> bool:
        """Return True while the last attempt's writer is alive; until it is closed if that is not known."""
        return self.status == "recording"

    @property
    def status(self) -> Status:
        """Return the state of the last attempt: recording as long as any rank is, closed once every one is."""
        found = set(self.statuses.values())
        if "recording" in found:
            return "recording"
        return "interrupted" if "interrupted" in found else "closed"

    @property
    def statuses(self) -> dict[int, Status]:
        """Return the state of each rank of the last launch."""
        return self._last.statuses()

    @property
    def manifest(self) -> dict[str, Any]:
        """Return the last attempt's sites, plan, model and environment. Of several ranks the lowest one's."""
        return next((found for run in reversed(self._launches) if (found := run.lowest.manifest)), {})

    @property
    def model_tree(self) -> dict[str, object]:
        """Return the model's modules as the manifest has them."""
        tree = self.manifest.get("model")
        return tree if isinstance(tree, dict) else {}

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that wrote into this run."""
        return list(self._ranks)

    @property
    def attempts(self) -> list[int]:
        """Return the attempts of this rank, or of any."""
        here = {attempt for run in self._launches for attempt in run.launch.attempts.values()}
        return sorted(here | {run.attempt for run in self._aside})

    def rank(self, rank: int) -> Run:
        """Return the same run as one rank saw it."""
        return Run(
            self.path,
            rank=rank,
            attempt=self._attempt,
            phase=self._phase,
            partial=self._partial,
            root=self._root,
        )

    @property
    def phases(self) -> list[str]:
        """Return the phases of the records: ``train``, ``eval``, and those that the user named."""
        phases = (phase for launch, own, _ in self._in_turn() for phase in launch.phases(own))
        return list(dict.fromkeys(phases))

    def of_phase(self, phase: str) -> Run:
        """Return the same run with the records of one phase alone."""
        return Run(self.path, rank=self.shown_rank, attempt=self._attempt, phase=phase, partial=self._partial)

    def phase_of(self, site: str) -> str:
        """Return the phase that a site is shown in by default: training if it was recorded then."""
        phases = self.phases
        if len(phases) <= 1:
            return phases[0] if phases else TRAINING
        recorded = {phase for launch in self._launches for phase in launch.phases_of(site)}
        return first_phase(phases, recorded)

    @property
    def problems(self) -> list[str]:
        """Describe what is damaged, missing or lost; empty if nothing is."""
        found = [problem for launch in self._launches for problem in launch.problems()]
        found += [
            f"rank {run.rank}, attempt {run.attempt}: it was written while another attempt was: two processes took "
            f"themselves for rank {run.rank}, because neither a process group nor RANK told them apart when they "
            f"were watched. tt.open(path, rank={run.rank}, attempt={run.attempt}) shows it"
            for run in self._aside
        ]
        if len(self._ranks) == 1 and not self._one_rank:
            found += absent_ranks(self._ranks, self.manifest.get("world"))
        return found

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return everything noted beside the values, in order; ``kind`` is one of lost, warning, coverage ..."""
        found = (event for launch in self._launches for event in launch.events())
        return [event for event in found if kind is None or event.get("kind") == kind]

    def coverage(self) -> dict[str, object]:
        """Return the last account of expected and recorded values; empty if there is none."""
        noted = self.events("coverage")
        last = noted[-1] if noted else {}
        return {name: fact for name, fact in last.items() if name not in ("kind", "time", "attempt")}

    # --- sites and steps ----------------------------------------------------------------------------------

    def _site_names(self) -> dict[str, None]:
        if self._names is None:
            found: dict[str, None] = {}
            for launch in self._launches:
                found.update(launch.site_names())
            if len(self._launches) > 1:
                found = dict.fromkeys([name for name in self.site_facts() if name in found] + list(found))
            self._names = found
        return self._names

    def sites(self) -> list[str]:
        """Return the recorded sites, in the order of execution if the session noted it."""
        return list(self._site_names())

    def site_facts(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each site (class, source, shape, dtype ...), by name, in the order of execution.

        They are from the manifest and the last event ``sites``, whose order counts. The shape of a value that ranks
        share is that of the whole.
        """
        found: dict[str, dict[str, Any]] = {}
        for launch in reversed(self._launches):
            for site, facts in launch.site_facts().items():
                if found.setdefault(site, facts).get("shape") is None:
                    found[site] = {**found[site], **facts}
        return found

    def placement(self, site: str, step: int | None = None, phase: str | None = None) -> Placement | None:
        """Return which part of the whole a site's value is, on the shown rank; of all ranks, the lowest that has it.

        None if one process recorded alone, and in runs that are older than placements.
        """
        site = self._check(site)
        return self._at(step).placement(site, step, self.phase_of(site) if phase is None else phase)

    def is_whole(self, site: str, statistic: str, step: int | None = None, phase: str | None = None) -> bool:
        """Return True if `series` gives this statistic of the whole value; False if it is one rank's own.

        A statistic does not fold over ranks if the ranks hold summands of the value (except its mean), if their parts
        are not known, or if it is a metric without an ``aggregate``. Always True for a run of one rank.
        """
        site = self._check(site)
        chosen, launch = self.phase_of(site) if phase is None else phase, self._at(step)
        return site not in launch.holders() or launch.is_whole(site, statistic, step, chosen)

    def statistics(self, site: str | None = None) -> list[str]:
        """Return the statistics recorded of a site, or of any."""
        if site is not None:
            site = self._check(site)
        return list(dict.fromkeys(name for launch in self._launches for name in launch.statistics(site)))

    def steps(self, site: str | None = None) -> Steps:
        """Return all recorded steps, ascending; or those at which a value of ``site`` was recorded."""
        if site is not None:
            site = self._check(site)
        phase = None if site is None else self.phase_of(site)
        found = [np.zeros(0, np.int64)]
        for launch, own, _ in self._in_turn():
            steps = launch.steps(site, phase)
            found.append(steps if own is None else np.intersect1d(steps, own))
        return np.unique(np.concatenate(found))

    def clock(self) -> np.recarray:
        """Return columns step, epoch, batch, phase, time, passes, skipped (``clock.step``) of each record.

        An epoch or a batch that was not set is -1. Of several ranks it is the lowest one's clock, with the records
        that only other ranks have.
        """
        rows: list[np.ndarray] = []
        for launch, own, _ in self._in_turn():
            clock = np.asarray(launch.clock())
            rows.append(clock if own is None else clock[np.isin(clock["step"], own)])
        table = np.concatenate(rows)
        return table[np.argsort(table["step"], kind="stable")].view(np.recarray)

    # --- numbers ------------------------------------------------------------------------------------------

    def series(
        self, site: str, statistic: str | None = None, phase: str | None = None, *, partial: bool = False
    ) -> Series:
        """Return one statistic of one site in one phase: ``(steps, values)``, ascending.

        A module's path stands for its output, the name of a logged number for that number; this has one statistic
        and needs none named. Without ``phase``, training if the site was recorded then. Evaluations are series of
        their own. A step that a later attempt recorded again and lost to damage is an error; with ``partial`` its
        value is NaN. Of several ranks it is that of the whole; steps that a rank has no part of are left out, and
        ``partial`` folds what there is of them.
        """
        if phase is not None and phase not in self.phases:
            raise no_such_phase(self.path, phase, self.phases)
        site = spelled_out(site, self._site_names())
        if statistic is None:
            statistic = only_statistic(site, self.statistics(site))
        chosen = self.phase_of(site) if phase is None else phase
        block = self._numbers(statistic, [site], chosen, partial)
        found = Series(block.steps[block.there[0]], block.values[0, block.there[0]])
        if not len(found.steps):
            known = self.statistics(site)  # raises when the site itself is unknown
            if statistic not in known:
                raise no_such_statistic(repr(site), statistic, known)
        return found

    def matrix(
        self,
        statistic: str,
        sites: Sequence[str] | None = None,
        steps: Sequence[int] | Steps | None = None,
        phase: str | None = None,
        *,
        partial: bool = False,
    ) -> Matrix:
        """Return one statistic as ``(sites, steps, values[site, step])``, NaN where nothing was recorded.

        Without ``sites``, all that have this statistic; without ``steps``, all at which one of them has it; without
        ``phase``, each site in the phase that `series` shows it in.
        """
        if statistic not in (known := self.statistics()):
            raise no_such_statistic("the run", statistic, known)
        if sites is None:
            chosen = [site for site in self.sites() if statistic in self.statistics(site)]
        else:
            chosen = [self._check(site) for site in sites]
        wanted = None if steps is None else np.unique(np.asarray(steps, np.int64))
        by_phase: dict[str, list[int]] = {}
        for row, site in enumerate(chosen):
            by_phase.setdefault(phase or self.phase_of(site), []).append(row)
        blocks = [
            (rows, self._numbers(statistic, [chosen[row] for row in rows], each, partial, wanted))
            for each, rows in by_phase.items()
        ]
        block = Block.stacked(len(chosen), blocks) if len(blocks) != 1 else blocks[0][1]
        block = block.once() if wanted is None else block.at(wanted)
        return Matrix(chosen, block.steps, np.where(block.there, block.values, np.nan))

    def _numbers(
        self, statistic: str, sites: Sequence[str], phase: str, partial: bool, steps: Steps | None = None
    ) -> Block:
        """Read one statistic of some sites in a phase, over the steps that each launch owns."""
        lenient = partial or self._partial
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

    def table(
        self,
        sites: Sequence[str] | None = None,
        statistics: Sequence[str] | None = None,
        *,
        partial: bool = False,
    ) -> Table:
        """Return every number as rows: step, epoch, batch, phase, site, statistic, value."""
        site_names = list(dict.fromkeys(self.sites() if sites is None else map(self._check, sites)))
        kinds = list(dict.fromkeys(self.statistics() if statistics is None else statistics))
        for unknown in set(kinds).difference(self.statistics()):
            raise no_such_statistic("this run", unknown, self.statistics())
        clock, phases = np.asarray(self.clock()), self.phases or [TRAINING]
        none = np.zeros(0, np.int64)
        cells: list[tuple[np.ndarray, ...]] = [
            (none, none, none, none, np.zeros(0))
        ]  # clock row, codes, value
        for code, phase in enumerate(phases):
            here = np.flatnonzero(clock["phase"] == phase)
            for kind, statistic in enumerate(kinds):
                found = self._numbers(statistic, site_names, phase, partial)
                columns, rows = np.nonzero(found.there.T)
                if len(columns):
                    at = here[np.searchsorted(clock["step"][here], found.steps[columns])]
                    values = found.values[rows, columns]
                    cells.append((at, np.full(len(at), code), rows, np.full(len(at), kind), values))
        at, codes, rows, numbers, values = (np.concatenate(column) for column in zip(*cells, strict=True))
        order = np.lexsort((numbers, rows, codes, clock["step"][at]))
        at = at[order]
        step, epoch, batch = (clock[name][at] for name in ("step", "epoch", "batch"))
        of_phase, of_site, of_kind = (each[order].astype(np.int32) for each in (codes, rows, numbers))
        return Table(step, epoch, batch, of_phase, of_site, of_kind, values[order], phases, site_names, kinds)

    # --- tensors ------------------------------------------------------------------------------------------

    def tensors(self, site: str | None = None, phase: str | None = None) -> list[TensorRef]:
        """Return every stored tensor, or those of one site, by step; of a site in several phases those of training."""
        site = None if site is None else spelled_out(site, self._site_names())
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
        found = of_one_phase(found, self.phases) if phase is None else [r for r in found if r.phase == phase]
        if site is not None and not found:
            site = self._check(site)
        return sorted(found, key=lambda ref: ref.step)

    def tensor(
        self,
        site: str,
        step: int | None = None,
        field: str = "value",
        *,
        reduction: str | None = None,
        phase: str | None = None,
    ) -> Tensor:
        """Return a stored tensor; without ``step`` the last one. Other reductions' parts have other ``field``s.

        Of several ranks it is put together from their parts.
        """
        return steady(lambda: self._find(site, step, field, reduction, phase).tensor(), self.refresh)

    def tensor_pieces(
        self, site: str, step: int | None = None, *, size: int = 1 << 20
    ) -> tuple[TensorRef, Iterator[memoryview]] | None:
        """Return a stored whole tensor and its bytes in order, in pieces of about ``size``; None if it is packed.

        A piece is overwritten by the next but one. The end raises `RunCorruptError` if the bytes were damaged, so
        nothing that was made of them may be used before it is reached.
        """
        found = steady(lambda: self._find(site, step, "value", "full"), self.refresh)
        pieces = found.pieces(size)
        return None if pieces is None else (found.ref(), pieces)

    def array(
        self,
        site: str,
        step: int | None = None,
        field: str = "value",
        *,
        reduction: str | None = None,
        phase: str | None = None,
    ) -> np.ndarray:
        """Return the same as numpy, without importing torch; bfloat16 and narrower are widened to float32."""
        return steady(lambda: self._find(site, step, field, reduction, phase).array(), self.refresh)

    def histogram(self, site: str, step: int | None = None, phase: str | None = None) -> HistogramResult:
        """Return a stored histogram; without ``step`` the last one."""

        def read() -> HistogramResult:
            counts = self._find(site, step, "counts", "histogram", phase)
            about = counts.ref()
            edges = self._find(site, about.step, "edges", about.reduction, about.phase)
            return HistogramResult(counts.array(), edges.array())

        return steady(read, self.refresh)

    def _find(
        self, site: str, step: int | None, field: str, reduction: str | None, phase: str | None = None
    ) -> FoundTensor:
        site = spelled_out(site, self._site_names())
        for chosen in [phase] if phase is not None else in_order(self.phases):
            found = self._found(site, step, field, reduction, chosen)
            if found is not None:
                return found
        raise no_such_tensor(site, step, field, self.tensors(site, phase))

    def _found(
        self, site: str, step: int | None, field: str, reduction: str | None, phase: str
    ) -> FoundTensor | None:
        """Return a tensor of a phase; without ``step``, the one of the largest step."""
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

    def _check(self, site: str) -> str:
        """Return the recorded site that ``site`` means: itself, a module's output, or a logged number by its name."""
        found = spelled_out(site, known := self._site_names())
        if found not in known:
            raise no_such_site(site, known)
        return found

    def __repr__(self) -> str:
        return run_text(self)

    def _repr_html_(self) -> str:
        return str(drawn("run", self))

    def plot(
        self, sites: str | Sequence[str] | None = None, statistic: str | None = None, **options: Any
    ) -> Figure:
        """Draw a matplotlib figure: a few sites as lines, many as a map; the options are those of `torchtap.plot`."""
        figure: Figure = drawn("figure", self, sites, statistic, **options)
        return figure


def _ranks_in(path: str, names: Sequence[str], wanted: int | None) -> list[int]:
    """Return the ranks that have a folder in a run. Raise if this is no run, or the wanted rank is not there."""
    ranks = sorted(found for name in names if (found := parse_rank(name)) is not None)
    if not ranks:
        if not names and ("://" in path or not os.path.isdir(path)):
            raise RunNotFoundError(f"there is no run at {path}")
        raise RunFormatError(f"{path} is not a run: it has no folder 'rank-00000'{run_inside(path, names)}")
    if wanted is not None and wanted not in ranks:
        raise SelectionError(f"the run at {path} has no rank {wanted}; its ranks are {ranks}")
    return ranks


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
