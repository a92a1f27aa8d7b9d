"""Open a run and read it, while it is being written or long after. Imports no torch.

It guarantees:
- only what is asked for is read: a series reads its own bytes, a tensor its own;
- what is returned was verified against its checksum, or the read raises `RunCorruptError`;
- damaged, missing and lost things are listed in ``problems``, everything else stays readable;
- a step is seen whole or not at all; what was seen once stays seen.

A run that several ranks wrote is one: numbers are folded over ranks, tensors put together, replicas taken once.
`Run.rank` shows one rank. `torchtap.ranks.recording` puts launches and ranks together.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from torchtap.display import drawn
from torchtap.errors import RunFormatError, RunNotFoundError, SelectionError
from torchtap.placement import Placement
from torchtap.ranks.launch_run import absent_ranks
from torchtap.ranks.recording import Recording
from torchtap.store.files.folder import anchored, is_run, run_inside
from torchtap.store.files.layout import parse_rank
from torchtap.store.read.lookup import (
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
from torchtap.store.read.packs import run_folder
from torchtap.store.read.rank_run import steady
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

__all__ = ["Run", "is_run", "open", "open_run"]


def open_run(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    attempt: int | None = None,
    phase: str | None = None,
    partial: bool = False,
) -> Run:
    """Open a run folder, on this machine or remote (``s3://...``): of all ranks, or one; one attempt or phase if asked.

    An attempt is one rank's own: without ``rank``, the lowest one's. ``partial`` gives what there is of a damaged run
    where the default is an error.
    """
    return Run(os.fspath(path), rank=rank, attempt=attempt, phase=phase, partial=partial)


open = open_run  # the front door's ``tt.open``


def _ranks_in(path: str, names: Sequence[str], wanted: int | None) -> list[int]:
    """The ranks that have a folder in a run; an error where this is no run, or the wanted rank is not there."""
    ranks = sorted(found for name in names if (found := parse_rank(name)) is not None)
    if not ranks:
        if not names and ("://" in path or not os.path.isdir(path)):
            raise RunNotFoundError(f"there is no run at {path}")
        raise RunFormatError(f"{path} is not a run: it has no folder 'rank-00000'{run_inside(path, names)}")
    if wanted is not None and wanted not in ranks:
        raise SelectionError(f"the run at {path} has no rank {wanted}; its ranks are {ranks}")
    return ranks


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
    ) -> None:
        self.path = path = anchored(path)
        self._attempt = attempt
        self._phase = phase
        self._partial = partial
        root = run_folder(path)
        self._ranks = _ranks_in(path, root.names(), rank)
        self._asked = rank is not None or attempt is not None  # for one rank alone
        # Whose recording is shown; None for that of all.
        self.shown_rank = rank
        if rank is None and (self._asked or len(self._ranks) == 1):
            self.shown_rank = self._ranks[0]
        shown = self._ranks if self.shown_rank is None else [self.shown_rank]
        self._recording = Recording(root, path, shown, attempt=attempt, phase=phase, partial=partial)
        if phase is not None and phase not in self.phases:
            raise no_such_phase(path, phase, Run(path, rank=rank, attempt=attempt).phases)

    def __reduce__(self) -> tuple[Callable[[], Run], tuple[()]]:
        """In another process the run is opened anew."""
        again = functools.partial(
            Run,
            self.path,
            rank=self.shown_rank,
            attempt=self._attempt,
            phase=self._phase,
            partial=self._partial,
        )
        return again, ()

    # --- keeping up with a live run -----------------------------------------------------------------------

    def refresh(self) -> None:
        """See what was written since the run was opened or refreshed."""
        self._recording.refresh()

    def follow(self, poll: float = 0.5) -> Iterator[int]:
        """Each step as it becomes visible, those already there first; ends when the recording has ended.

        Of several ranks the lowest one's steps.
        """
        return self._recording.follow(poll)

    def _steady(self, read: Callable[[], T]) -> T:
        return steady(read, self.refresh)

    @property
    def closed(self) -> bool:
        """Whether the last attempt was closed in good order, on every rank."""
        return self.status == "closed"

    @property
    def recording(self) -> bool:
        """Whether the last attempt's writer is alive; where nobody can tell, until the run is closed."""
        return self.status == "recording"

    @property
    def status(self) -> Status:
        """How the last attempt stands: recording as long as any rank is, closed once every one is."""
        return self._recording.status

    @property
    def statuses(self) -> dict[int, Status]:
        """How each rank of the last launch stands."""
        return self._recording.statuses

    # --- what the run is ----------------------------------------------------------------------------------

    @property
    def manifest(self) -> dict[str, Any]:
        """What the last attempt said of itself: sites, plan, model, environment. Of several ranks the lowest one's."""
        return self._recording.manifest

    @property
    def model_tree(self) -> dict[str, object]:
        """The model's modules as the manifest has them."""
        tree = self.manifest.get("model")
        return tree if isinstance(tree, dict) else {}

    @property
    def ranks(self) -> list[int]:
        """The ranks that wrote into this run."""
        return list(self._ranks)

    @property
    def attempts(self) -> list[int]:
        """The attempts of this rank, or of any."""
        return self._recording.attempts

    def rank(self, rank: int) -> Run:
        """The same run as one rank saw it."""
        return Run(self.path, rank=rank, attempt=self._attempt, phase=self._phase, partial=self._partial)

    @property
    def phases(self) -> list[str]:
        """The phases that anything was recorded in: ``train``, ``eval``, and those that the user named."""
        return self._recording.phases

    def of_phase(self, phase: str) -> Run:
        """The same run with the records of one phase alone."""
        return Run(self.path, rank=self.shown_rank, attempt=self._attempt, phase=phase, partial=self._partial)

    def phase_of(self, site: str) -> str:
        """The phase that a site is shown in where none is asked for: training where it was recorded then."""
        return self._recording.phase_of(site)

    @property
    def problems(self) -> list[str]:
        """What is damaged, missing, lost or torn, in sentences; empty when all is well."""
        found = self._recording.problems
        if len(self._ranks) == 1 and not self._asked:
            found += absent_ranks(self._ranks, self.manifest.get("world"))
        return found

    def events(self, kind: str | None = None) -> list[dict[str, object]]:
        """Everything noted beside the values, in order; ``kind`` is one of lost, warning, coverage ..."""
        found = self._recording.events()
        return [event for event in found if kind is None or event.get("kind") == kind]

    def coverage(self) -> dict[str, object]:
        """What was expected and what came, as the session noted it last; empty when it never did."""
        noted = self.events("coverage")
        last = noted[-1] if noted else {}
        return {name: fact for name, fact in last.items() if name not in ("kind", "time", "attempt")}

    # --- numbers ------------------------------------------------------------------------------------------

    def sites(self) -> list[str]:
        """The sites that something was recorded of, in the order of execution as far as the session noted it."""
        return list(self._recording.site_names())

    def site_facts(self) -> dict[str, dict[str, object]]:
        """What is known of each site (class, source, shape, dtype ...), by name, in the order of execution.

        From the manifest and, where the training has shown more, from the last event ``sites``, whose order counts.
        The shape of a value that ranks share is that of the whole.
        """
        return self._recording.site_facts()

    def placement(self, site: str, step: int | None = None, phase: str | None = None) -> Placement | None:
        """Which part of the whole a site's value is, on the rank that is shown; of all ranks, the lowest that has it.

        None where one process recorded alone, and in runs that are older than placements.
        """
        self._check(site)
        return self._recording.placement(site, step, self.phase_of(site) if phase is None else phase)

    def is_whole(self, site: str, statistic: str, step: int | None = None, phase: str | None = None) -> bool:
        """Return True if `series` gives this statistic of the whole value; False if it is one rank's own.

        A statistic does not fold over ranks if the ranks hold summands of the value (except its mean), if their parts
        are not known, or if it is a metric without an ``aggregate``. Always True for a run of one rank.
        """
        self._check(site)
        chosen = self.phase_of(site) if phase is None else phase
        return self._recording.is_whole(site, statistic, step, chosen)

    def statistics(self, site: str | None = None) -> list[str]:
        """The statistics recorded of a site, or of any."""
        if site is not None:
            self._check(site)
        return self._recording.statistics(site)

    def steps(self, site: str | None = None) -> npt.NDArray[np.int64]:
        """All recorded steps, ascending; or those at which something of ``site`` was recorded."""
        if site is not None:
            self._check(site)
        return self._recording.steps(site)

    def clock(self) -> np.recarray:
        """Columns step, epoch, batch, phase, time, passes, skipped (``clock.step``, ``clock["step"]``) of each record.

        An epoch or a batch that was not set is -1.
        """
        return self._recording.clock()

    def series(
        self, site: str, statistic: str | None = None, phase: str | None = None, *, partial: bool = False
    ) -> Series:
        """One statistic of one site in one phase: ``(steps, values)``, ascending.

        A module's path stands for its output, the name of a logged number for that number; this has one statistic
        and needs none named. Without ``phase``, in training where it was recorded then. Evaluations are series of
        their own. A step that a later attempt recorded again and lost to damage is an error; with ``partial`` its
        value is NaN. Of several ranks it is that of the whole; steps that a rank has no part of are left out, and
        ``partial`` folds what there is of them.
        """
        if phase is not None and phase not in self.phases:
            raise no_such_phase(self.path, phase, self.phases)
        site = spelled_out(site, self._recording.site_names())
        if statistic is None:
            statistic = only_statistic(site, self.statistics(site))
        chosen = self.phase_of(site) if phase is None else phase
        block = self._recording.numbers(statistic, [site], lambda _: chosen, partial=partial)
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
        steps: Sequence[int] | npt.NDArray[np.int64] | None = None,
        phase: str | None = None,
        *,
        partial: bool = False,
    ) -> Matrix:
        """One statistic as ``(sites, steps, values[site, step])``, NaN where nothing was recorded.

        Without ``sites``, all that have this statistic; without ``steps``, all at which one of them has it; without
        ``phase``, each site in the phase that `series` shows it in.
        """
        if statistic not in (known := self.statistics()):
            raise no_such_statistic("the run", statistic, known)
        if sites is None:
            chosen = [site for site in self.sites() if statistic in self.statistics(site)]
        else:
            chosen = list(sites)
            for site in chosen:
                self._check(site)
        wanted = None if steps is None else np.unique(np.asarray(steps, np.int64))
        block = self._recording.numbers(
            statistic, chosen, lambda site: phase or self.phase_of(site), steps=wanted, partial=partial
        )
        block = block.once() if wanted is None else block.at(wanted)
        return Matrix(chosen, block.steps, np.where(block.there, block.values, np.nan))

    def table(
        self,
        sites: Sequence[str] | None = None,
        statistics: Sequence[str] | None = None,
        *,
        partial: bool = False,
    ) -> Table:
        """Every number as rows: step, epoch, batch, phase, site, statistic, value."""
        for site in sites or ():
            self._check(site)
        site_names = list(dict.fromkeys(self.sites() if sites is None else sites))
        statistic_names = list(dict.fromkeys(self.statistics() if statistics is None else statistics))
        return self._recording.table(site_names, statistic_names, partial=partial)

    # --- tensors ------------------------------------------------------------------------------------------

    def tensors(self, site: str | None = None, phase: str | None = None) -> list[TensorRef]:
        """Every stored tensor, or those of one site, by step; of a site in several phases those of training."""
        found = self._recording.tensors(site)
        found = of_one_phase(found, self.phases) if phase is None else [r for r in found if r.phase == phase]
        if site is not None and not found:
            self._check(site)
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
        """A stored tensor; without ``step`` the last one. Other reductions' parts have other ``field``s.

        Of several ranks it is put together from their parts.
        """
        return self._steady(lambda: self._find(site, step, field, reduction, phase).tensor())

    def tensor_pieces(
        self, site: str, step: int | None = None, *, size: int = 1 << 20
    ) -> tuple[TensorRef, Iterator[memoryview]] | None:
        """A stored whole tensor and its bytes in order, in pieces of about ``size``; None where it is packed.

        A piece is overwritten by the next but one. The end raises `RunCorruptError` when the bytes were damaged, so
        nothing that was made of them may be used before it is reached.
        """
        found = self._steady(lambda: self._find(site, step, "value", "full"))
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
        """The same as numpy, without importing torch; bfloat16 and narrower are widened to float32."""
        return self._steady(lambda: self._find(site, step, field, reduction, phase).array())

    def histogram(self, site: str, step: int | None = None, phase: str | None = None) -> HistogramResult:
        """A stored histogram; without ``step`` the last one."""

        def read() -> HistogramResult:
            counts = self._find(site, step, "counts", "histogram", phase)
            about = counts.ref()
            edges = self._find(site, about.step, "edges", about.reduction, about.phase)
            return HistogramResult(counts.array(), edges.array())

        return self._steady(read)

    def _find(
        self, site: str, step: int | None, field: str, reduction: str | None, phase: str | None = None
    ) -> FoundTensor:
        site = spelled_out(site, self._recording.site_names())
        for chosen in [phase] if phase is not None else in_order(self.phases):
            found = self._recording.find(site, step, field, reduction, chosen)
            if found is not None:
                return found
        raise no_such_tensor(site, step, field, self.tensors(site, phase))

    def _check(self, site: str) -> None:
        if site not in (known := self._recording.site_names()):
            raise no_such_site(site, known)

    def __repr__(self) -> str:
        return run_text(self)

    def _repr_html_(self) -> str:
        return str(drawn("run", self))

    def plot(
        self, sites: str | Sequence[str] | None = None, statistic: str | None = None, **options: Any
    ) -> Figure:
        """A matplotlib figure: a few sites as lines, many as a map; the options are those of `torchtap.plot`."""
        figure: Figure = drawn("figure", self, sites, statistic, **options)
        return figure
