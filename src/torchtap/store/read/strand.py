"""One rank's recording: its attempts as one line of steps. A `View`.

It guarantees:
- only what is asked for is read: a series reads its own bytes, a tensor its own;
- a step is seen whole or not at all; what was seen once stays seen;
- attempts that several processes wrote at the same moment, each taking itself for this rank, are not mixed: the first
  one is shown, and a problem names the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from typing import Any, TypeGuard, TypeVar, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunFormatError
from torchtap.placement import Placement, placement_of
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import attempt_folder, parse_attempt, rank_folder
from torchtap.store.format.scalars import CLOCK
from torchtap.store.read.assemble import matrix_of, phases_of, series_of, steps_of, table_of
from torchtap.store.read.clock import Timeline
from torchtap.store.read.doubt import Ranges
from torchtap.store.read.grids import Axes, AxesCache
from torchtap.store.read.lookup import described_sites, find_tensor
from torchtap.store.read.part import Part
from torchtap.store.read.phases import TRAINING, first_phase
from torchtap.store.read.results import Matrix, Series, Table, TensorRef
from torchtap.store.read.stored_tensors import StoredTensor
from torchtap.store.read.view import Status

__all__ = ["Changes", "Strand", "at_step", "steady"]

T = TypeVar("T")
Changes = list[tuple[int, str, Placement]]  # from a step on, in a phase
_TRIES = 5  # of a reading


def steady(read: Callable[[], T], refresh: Callable[[], object]) -> T:
    """Read; again with a fresh look if merging has replaced a file in between."""
    for _ in range(_TRIES):
        try:
            return read()
        except FileNotFoundError:
            refresh()
    return read()


@final
class Strand:
    """What one rank wrote. ``only`` are the attempts that count."""

    def __init__(
        self,
        root: Folder,
        path: str,
        rank: int,
        *,
        axes: AxesCache,
        only: Collection[int] | None = None,
        phase: str | None = None,
        partial: bool = False,
    ) -> None:
        self.path = path
        self.rank = rank
        self._folder = root.child(rank_folder(rank))
        self._axes = axes
        self._only = only
        self._only_phase = phase
        self._partial = partial
        self._parts: dict[int, Part] = {}
        self._aside: dict[int, Part] = {}  # written beside others at the same moment
        self._timeline = Timeline([])
        self._names: dict[str, None] | None = None
        self._distinct: list[Axes] | None = None
        self._site_phases: dict[str, set[str]] | None = None
        self._placed: tuple[int, dict[str, Changes]] = (-1, {})
        self.refresh()

    # --- keeping up with a live run -----------------------------------------------------------------------

    def refresh(self) -> None:
        known = {**self._parts, **self._aside}
        for attempt in filter(self._is_wanted, map(parse_attempt, self._folder.names())):
            if attempt not in known:
                folder = self._folder.child(attempt_folder(attempt))
                known[attempt] = Part(folder, self.rank, attempt, self._axes)
        if not known:
            wanted = "attempt" if self._only is None else f"attempt {', '.join(map(str, self._only))}"
            raise RunFormatError(f"{self.path}: rank {self.rank} has no {wanted}")
        for part in known.values():
            part.refresh()
        self._parts, self._aside = _in_turn(dict(sorted(known.items())))
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

    def _is_wanted(self, attempt: int | None) -> TypeGuard[int]:
        return attempt is not None and (self._only is None or attempt in self._only)

    def follow(self, poll: float) -> Iterator[int]:
        seen: dict[int, int] = {}
        while True:
            ended = self.status != "recording"  # asked before looking, so that nothing until then is missed
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
        return steady(read, self.refresh)

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
    def status(self) -> Status:
        last = next(reversed(self._parts.values()))
        if last.closing is not None:
            return "closed"
        return "recording" if last.recording is not False else "interrupted"

    @property
    def statuses(self) -> dict[int, Status]:
        return {self.rank: self.status}

    # --- what it says of itself ---------------------------------------------------------------------------

    @property
    def manifest(self) -> dict[str, Any]:
        for part in reversed(self._parts.values()):
            if part.manifest:
                return part.manifest
        return {}

    @property
    def attempts(self) -> list[int]:
        return sorted((*self._parts, *self._aside))

    @property
    def phases(self) -> list[str]:
        return list(self._timeline.phases)

    def phases_of_sites(self) -> dict[str, set[str]]:
        """The phases in which anything of each site was recorded."""
        if self._site_phases is None:
            self._site_phases = self._steady(lambda: phases_of(self._all_parts(), self._line(partial=True)))
        return self._site_phases

    def phase_of(self, site: str) -> str:
        phases = self.phases
        if len(phases) <= 1:
            return phases[0] if phases else TRAINING
        return first_phase(phases, self.phases_of_sites().get(site, ()))

    @property
    def problems(self) -> list[str]:
        found = [problem for part in self._parts.values() for problem in part.problems()]
        beside = (
            f"rank {self.rank}, attempt {attempt}: it was written while another attempt was: two processes took "
            f"themselves for rank {self.rank}, because neither a process group nor RANK told them apart when they "
            f"were watched. tt.open(path, rank={self.rank}, attempt={attempt}) shows it"
            for attempt in self._aside
        )
        return [*found, *beside]

    @property
    def lost_steps(self) -> Ranges:
        """The steps of files that are damaged or missing."""
        return [steps for part in self._parts.values() for steps in part.lost_steps]

    def events(self) -> list[dict[str, object]]:
        return [event for part in self._parts.values() for event in part.events()]

    def placements(self) -> dict[str, Changes]:
        """By site: which part of the whole its values are, from which step on, in which phase."""
        events = self.events()
        if self._placed[0] != len(events):
            found: dict[str, Changes] = {}
            for event in events:
                if event.get("kind") == "placements":
                    _add_placements(found, event)
            self._placed = len(events), found
        return self._placed[1]

    def placement(self, site: str, step: int | None, phase: str) -> Placement | None:
        return at_step(self.placements().get(site, []), step, phase)

    # --- sites and steps ----------------------------------------------------------------------------------

    def site_names(self) -> dict[str, None]:
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

    def site_facts(self) -> dict[str, dict[str, object]]:
        noted = [event for event in self.events() if event.get("kind") == "sites"]
        shown = described_sites(noted[-1].get("sites")) if noted else {}
        listed = described_sites(self.manifest.get("sites"))
        return {name: {**listed.get(name, {}), **shown.get(name, {})} for name in (*shown, *listed)}

    def statistics(self, site: str | None) -> list[str]:
        found: dict[str, None] = {}
        for axes in self._all_axes():
            if site is None or site in axes.site_index:
                found.update(dict.fromkeys(axes.statistics))
        return list(found)

    def steps(self, site: str | None) -> npt.NDArray[np.int64]:
        if site is None:
            return self._timeline.steps.copy()
        of_numbers = self._steady(
            lambda: steps_of(self._all_parts(), self._line(partial=True), site, self.phase_of(site))
        )
        of_tensors = np.array([ref.step for ref in self.tensors(site)], np.int64)
        return np.union1d(of_numbers, of_tensors)

    def clock(self) -> np.recarray:
        timeline = self._timeline
        order = np.flatnonzero(timeline.visible)
        order = order[np.argsort(timeline.clock.step[order], kind="stable")]
        columns = {name: getattr(timeline.clock, name)[order] for name in CLOCK}
        table = np.empty(len(order), [(name, column.dtype) for name, column in columns.items()])
        for name, column in columns.items():
            table[name] = column
        return table.view(np.recarray)

    # --- numbers ------------------------------------------------------------------------------------------

    def series(self, site: str, statistic: str, phase: str, *, partial: bool) -> Series:
        return self._steady(lambda: series_of(self._all_parts(), self._line(partial), site, statistic, phase))

    def matrix(
        self,
        statistic: str,
        sites: Sequence[str],
        steps: npt.NDArray[np.int64] | None,
        phase_of: Callable[[str], str],
        *,
        partial: bool,
    ) -> Matrix:
        return self._steady(
            lambda: matrix_of(self._all_parts(), self._line(partial), statistic, sites, steps, phase_of)
        )

    def table(self, sites: list[str], statistics: list[str], *, partial: bool) -> Table:
        return self._steady(lambda: table_of(self._all_parts(), self._line(partial), sites, statistics))

    # --- tensors ------------------------------------------------------------------------------------------

    def tensors(self, site: str | None) -> list[TensorRef]:
        return self._steady(lambda: self._tensors(site))

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

    def find(
        self, site: str, step: int | None, field: str, reduction: str | None, phase: str
    ) -> StoredTensor | None:
        found = self._steady(
            lambda: find_tensor(self._all_parts(), self._timeline, site, step, field, reduction, phase)
        )
        if found is not None:
            self._timeline.check(found.name.step)
        return found


def _in_turn(parts: dict[int, Part]) -> tuple[dict[int, Part], dict[int, Part]]:
    """Attempts that came one after the other, and those that another process wrote beside one of them."""
    kept: dict[int, Part] = {}
    aside: dict[int, Part] = {}
    for attempt, part in parts.items():
        beside = any(_went_on_after(other, part) for other in kept.values())
        (aside if beside else kept)[attempt] = part
    return kept, aside


def _went_on_after(part: Part, later: Part) -> bool:
    """Whether a process still wrote to a part when another one on the same host had recorded its first step."""
    if not len(part.clock) or not len(later.clock) or part.clock.time[-1] <= later.clock.time[0]:
        return False
    one, other = part.launch, later.launch
    return bool(one) and one.get("host") == other.get("host") and one.get("pid") != other.get("pid")


def _add_placements(found: dict[str, Changes], event: dict[str, object]) -> None:
    """What an event says; whatever in it is no placement is left out."""
    match event:
        case {"placements": list(listed), "sites": dict(sites), "step": int(step), "phase": str(phase)}:
            known = [placement_of(each) for each in listed]
            for site, number in sites.items():
                if type(number) is int and 0 <= number < len(known):
                    placement = known[number]
                    if placement is not None:
                        found.setdefault(site, []).append((step, phase, placement))


def at_step(changes: Changes, step: int | None, phase: str) -> Placement | None:
    """The placement that counts at a step; without one, the last. Of a phase that tells nothing, any other's."""
    own = [each for each in changes if each[1] == phase] or changes
    before = [each for each in own if step is None or each[0] <= step]
    return before[-1][2] if before else own[0][2] if own else None
