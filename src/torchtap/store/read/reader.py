"""Open a run and read it, while it is being written or long after. Imports no torch.

It guarantees:
- only what is asked for is read: a series reads its own bytes, a tensor its own;
- what is returned was verified against its checksum, or the read raises `RunCorruptError`;
- damaged, missing and lost things are listed in ``problems``, everything else stays readable;
- a step is seen whole or not at all; what was seen once stays seen.

A run that several ranks wrote shows the lowest one; `Run.of_rank` shows another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

import numpy as np
import numpy.typing as npt

from torchtap.display import drawn
from torchtap.errors import RunFormatError, RunNotFoundError, SelectionError
from torchtap.store.files.layout import attempt_folder, parse_attempt, parse_rank, rank_folder
from torchtap.store.files.opening import folder_of, is_run, run_inside
from torchtap.store.format.scalars import CLOCK
from torchtap.store.read.assemble import matrix_of, phases_of, series_of, steps_of, table_of
from torchtap.store.read.clock import Timeline
from torchtap.store.read.grids import Axes, AxesCache
from torchtap.store.read.lookup import (
    described_sites,
    find_tensor,
    no_such_site,
    no_such_statistic,
    no_such_tensor,
    only_statistic,
    spelled_out,
)
from torchtap.store.read.part import Part
from torchtap.store.read.phases import TRAINING, first_phase, in_order, no_such_phase, of_one_phase
from torchtap.store.read.results import HistogramResult, Matrix, Series, Table, TensorRef
from torchtap.store.read.show import run_text
from torchtap.store.read.stored_tensors import StoredTensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

T = TypeVar("T")
_TRIES = 5

__all__ = ["Run", "is_run", "open", "open_run"]


def open_run(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    attempt: int | None = None,
    phase: str | None = None,
    partial: bool = False,
) -> Run:
    """Open a run folder, on this machine or remote (``s3://...``); one rank and, if asked, one attempt or phase.

    ``partial`` gives what there is of a damaged run where the default is an error.
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
    ) -> None:
        self.path = path
        self._only = attempt
        self._only_phase = phase
        self._partial = partial
        self._root = folder_of(path)
        names = self._root.names()
        self._ranks = sorted(found for name in names if (found := parse_rank(name)) is not None)
        if not self._ranks:
            if not names and ("://" in path or not os.path.isdir(path)):
                raise RunNotFoundError(f"there is no run at {path}")
            raise RunFormatError(
                f"{path} is not a run: it has no folder 'rank-00000'{run_inside(path, names)}"
            )
        self.rank = self._ranks[0] if rank is None else rank
        if self.rank not in self._ranks:
            raise SelectionError(f"the run at {path} has no rank {rank}; its ranks are {self._ranks}")
        self._axes: AxesCache = {}
        self._parts: dict[int, Part] = {}
        self._timeline = Timeline([])
        self._names: dict[str, None] | None = None
        self._distinct: list[Axes] | None = None
        self._site_phases: dict[str, set[str]] | None = None
        self.refresh()
        if phase is not None and phase not in self.phases:
            raise no_such_phase(path, phase, Run(path, rank=rank, attempt=attempt).phases)

    # --- keeping up with a live run -----------------------------------------------------------------------

    def refresh(self) -> None:
        """See what was written since the run was opened or refreshed."""
        folder = self._root.child(rank_folder(self.rank))
        for name in folder.names():
            attempt = parse_attempt(name)
            if attempt is not None and attempt not in self._parts and self._only in (None, attempt):
                self._parts[attempt] = Part(
                    folder.child(attempt_folder(attempt)), self.rank, attempt, self._axes
                )
        self._parts = dict(sorted(self._parts.items()))
        if not self._parts:
            wanted = f"attempt {self._only}" if self._only is not None else "attempt"
            raise RunFormatError(f"{self.path}: rank {self.rank} has no {wanted}")
        for part in self._parts.values():
            part.refresh()
        parts = self._parts.values()
        self._timeline = Timeline(
            [part.clock for part in parts],
            self._only_phase,
            [part.lost_steps for part in parts],
            partial=self._partial,
        )
        self._names = None
        self._site_phases = None
        self._distinct = None

    def follow(self, poll: float = 0.5) -> Iterator[int]:
        """Each step as it becomes visible, those already there first; ends when the recording has ended."""
        seen: dict[int, int] = {}
        while True:
            ended = not self.recording  # asked before looking, so that nothing written until then is missed
            self.refresh()
            previous = None
            for attempt, part in self._parts.items():
                steps = part.clock.step[seen.get(attempt, 0) :]
                seen[attempt] = len(part.clock)
                for step in steps.tolist():
                    if step != previous:
                        yield step
                    previous = step
            if ended:
                return
            time.sleep(poll)

    def _steady(self, read: Callable[[], T]) -> T:
        """Read; again with a fresh look if merging has replaced a file in between."""
        for _ in range(_TRIES):
            try:
                return read()
            except FileNotFoundError:
                self.refresh()
        return read()

    def _line(self, partial: bool) -> Timeline:
        """The timeline, which gives NaN for values in doubt where the caller wants what there is."""
        if not partial or self._timeline.partial:
            return self._timeline
        lenient = copy(self._timeline)
        lenient.partial = True
        return lenient

    def _all_parts(self) -> list[Part]:
        return list(self._parts.values())

    @property
    def _last(self) -> Part:
        return next(reversed(self._parts.values()))

    @property
    def closed(self) -> bool:
        """Whether the last attempt was closed in good order."""
        return self._last.closing is not None

    @property
    def recording(self) -> bool:
        """Whether the last attempt's writer is alive; where nobody can tell, until the run is closed."""
        return self._last.recording is not False

    @property
    def status(self) -> Literal["closed", "recording", "interrupted"]:
        """How the last attempt stands."""
        if self.closed:
            return "closed"
        return "recording" if self.recording else "interrupted"

    # --- what the run is ----------------------------------------------------------------------------------

    @property
    def manifest(self) -> dict[str, Any]:
        """What the last attempt said of itself: sites, plan, model, environment."""
        for part in reversed(self._parts.values()):
            if part.manifest:
                return part.manifest
        return {}

    @property
    def model_tree(self) -> dict[str, Any]:
        """The model's modules as the manifest has them."""
        tree = self.manifest.get("model")
        return tree if isinstance(tree, dict) else {}

    @property
    def ranks(self) -> list[int]:
        """The ranks that wrote into this run."""
        return list(self._ranks)

    @property
    def attempts(self) -> list[int]:
        """The attempts of this rank."""
        return list(self._parts)

    def of_rank(self, rank: int) -> Run:
        """The same run as another rank saw it."""
        return Run(self.path, rank=rank, attempt=self._only, phase=self._only_phase, partial=self._partial)

    @property
    def phases(self) -> list[str]:
        """The phases that anything was recorded in: ``train``, ``eval``, and those that the user named."""
        return list(self._timeline.phases)

    def of_phase(self, phase: str) -> Run:
        """The same run with the records of one phase alone."""
        return Run(self.path, rank=self.rank, attempt=self._only, phase=phase, partial=self._partial)

    def phase_of(self, site: str) -> str:
        """The phase that a site is shown in where none is asked for: training where it was recorded then."""
        phases = self.phases
        if len(phases) <= 1:
            return phases[0] if phases else TRAINING
        if self._site_phases is None:
            self._site_phases = self._steady(lambda: phases_of(self._all_parts(), self._timeline))
        return first_phase(phases, self._site_phases.get(site, ()))

    @property
    def problems(self) -> list[str]:
        """What is damaged, missing, lost or torn, in sentences; empty when all is well."""
        return [problem for part in self._parts.values() for problem in part.problems()]

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Everything noted beside the values, in order; ``kind`` is one of lost, warning, coverage ..."""
        found = [event for part in self._parts.values() for event in part.events()]
        return [event for event in found if kind is None or event.get("kind") == kind]

    def coverage(self) -> dict[str, Any]:
        """What was expected and what came, as the session noted it last; empty when it never did."""
        noted = self.events("coverage")
        last = noted[-1] if noted else {}
        return {name: fact for name, fact in last.items() if name not in ("kind", "time", "attempt")}

    # --- numbers ------------------------------------------------------------------------------------------

    def sites(self) -> list[str]:
        """The sites that something was recorded of, in the order of execution as far as the session noted it."""
        return list(self._site_names())

    def _site_names(self) -> dict[str, None]:
        if self._names is None:
            self._names = self._steady(self._find_sites)
        return self._names

    def _find_sites(self) -> dict[str, None]:
        found: dict[str, None] = {}
        for axes in self._all_axes():
            found.update(dict.fromkeys(axes.sites))
        for part in self._parts.values():
            for name in part.tensor_names:
                found.update((tensor.name.site, None) for tensor in part.tensors_in(name))
        return dict.fromkeys([name for name in self.site_facts() if name in found] + list(found))

    def _all_axes(self) -> list[Axes]:
        """The axes of every grid, equal ones once: a long run has thousands of grids of the same."""
        if self._distinct is None:
            parts = self._parts.values()
            grids = (grid for part in parts for segment in part.scalars for grid in segment.grids)
            self._distinct = list({id(grid.axes): grid.axes for grid in grids}.values())
        return self._distinct

    def site_facts(self) -> dict[str, dict[str, Any]]:
        """What is known of each site (class, source, shape, dtype ...), by name, in the order of execution.

        From the manifest and, where the training has shown more, from the last event ``sites``, whose order counts.
        """
        noted = self.events("sites")
        shown = described_sites(noted[-1].get("sites")) if noted else {}
        listed = described_sites(self.manifest.get("sites"))
        return {name: {**listed.get(name, {}), **shown.get(name, {})} for name in (*shown, *listed)}

    def statistics(self, site: str | None = None) -> list[str]:
        """The statistics recorded of a site, or of any."""
        if site is not None:
            self._check(site)
        found: dict[str, None] = {}
        for axes in self._all_axes():
            if site is None or site in axes.site_index:
                found.update(dict.fromkeys(axes.statistics))
        return list(found)

    def steps(self, site: str | None = None) -> npt.NDArray[np.int64]:
        """All recorded steps, ascending; or those at which something of ``site`` was recorded."""
        if site is None:
            return self._timeline.steps.copy()
        self._check(site)
        of_numbers = self._steady(
            lambda: steps_of(self._all_parts(), self._timeline, site, self.phase_of(site))
        )
        of_tensors = np.array([ref.step for ref in self.tensors(site)], np.int64)
        return np.union1d(of_numbers, of_tensors)

    def clock(self) -> np.recarray[Any, Any]:
        """Columns step, epoch, batch, phase, time, passes, skipped (``clock.step``, ``clock["step"]``) of each record.

        An epoch or a batch that was not set is -1.
        """
        timeline = self._timeline
        order = np.flatnonzero(timeline.visible)
        order = order[np.argsort(timeline.clock.step[order], kind="stable")]
        columns = {name: getattr(timeline.clock, name)[order] for name in CLOCK}
        table = np.empty(len(order), [(name, column.dtype) for name, column in columns.items()])
        for name, column in columns.items():
            table[name] = column
        return table.view(np.recarray)

    def series(
        self, site: str, statistic: str | None = None, phase: str | None = None, *, partial: bool = False
    ) -> Series:
        """One statistic of one site in one phase: ``(steps, values)``, ascending.

        A module's path stands for its output, the name of a logged number for that number; this has one statistic
        and needs none named. Without ``phase``, in training where it was recorded then. Evaluations are series of
        their own. A step that a later attempt recorded again and lost to damage is an error; with ``partial`` its
        value is NaN.
        """
        if phase is not None and phase not in self.phases:
            raise no_such_phase(self.path, phase, self.phases)
        site = spelled_out(site, self._site_names())
        if statistic is None:
            statistic = only_statistic(site, self.statistics(site))
        chosen = self.phase_of(site) if phase is None else phase
        found = self._steady(
            lambda: series_of(self._all_parts(), self._line(partial), site, statistic, chosen)
        )
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
        wanted = None if steps is None else np.asarray(steps, np.int64)
        return self._steady(
            lambda: matrix_of(
                self._all_parts(),
                self._line(partial),
                statistic,
                chosen,
                wanted,
                lambda site: phase or self.phase_of(site),
            )
        )

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
        return self._steady(
            lambda: table_of(self._all_parts(), self._line(partial), site_names, statistic_names)
        )

    # --- tensors ------------------------------------------------------------------------------------------

    def tensors(self, site: str | None = None, phase: str | None = None) -> list[TensorRef]:
        """Every stored tensor, or those of one site, by step; of a site in several phases those of training."""
        found = self._steady(lambda: self._tensors(site))
        found = of_one_phase(found, self.phases) if phase is None else [r for r in found if r.phase == phase]
        if site is not None and not found:
            self._check(site)
        return sorted(found, key=lambda ref: ref.step)

    def _tensors(self, site: str | None) -> list[TensorRef]:
        found: list[TensorRef] = []
        for number, part in enumerate(self._parts.values()):
            shown = self._timeline.shown_steps(number)
            for name in part.tensor_names:
                found += part.refs_in(name, site, shown)
        if self._partial and self._timeline.doubtful.any():
            doubt = set(self._timeline.clock.step[self._timeline.doubtful].tolist())
            found = [ref for ref in found if ref.step not in doubt]
        return found

    def tensor(
        self,
        site: str,
        step: int | None = None,
        field: str = "value",
        *,
        reduction: str | None = None,
        phase: str | None = None,
    ) -> Tensor:
        """A stored tensor; without ``step`` the last one. Other reductions' parts have other ``field``s."""
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
    ) -> npt.NDArray[Any]:
        """The same as numpy, without importing torch; bfloat16 and narrower are widened to float32."""
        return self._steady(lambda: self._find(site, step, field, reduction, phase).array())

    def histogram(self, site: str, step: int | None = None, phase: str | None = None) -> HistogramResult:
        """A stored histogram; without ``step`` the last one."""

        def read() -> HistogramResult:
            counts = self._find(site, step, "counts", "histogram", phase)
            edges = self._find(site, counts.name.step, "edges", counts.name.reduction, counts.name.phase)
            return HistogramResult(counts.array(), edges.array())

        return self._steady(read)

    def _find(
        self, site: str, step: int | None, field: str, reduction: str | None, phase: str | None = None
    ) -> StoredTensor:
        for chosen in [phase] if phase is not None else in_order(self.phases):
            found = find_tensor(self._all_parts(), self._timeline, site, step, field, reduction, chosen)
            if found is not None:
                self._timeline.check(found.name.step)
                return found
        raise no_such_tensor(site, step, field, self.tensors(site, phase))

    def _check(self, site: str) -> None:
        if site not in (known := self._site_names()):
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
