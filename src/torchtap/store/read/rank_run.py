"""One attempt of one rank: its sites, steps, numbers and tensors. Imports no torch.

Only the bytes that are needed are read: a series reads its own, a tensor its own. A step is visible whole or not at
all. Attempts in turn and several ranks are put together in `torchtap.ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunError
from torchtap.placement import Placement, placement_of
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import attempt_folder, rank_folder
from torchtap.store.format.payload import TensorName
from torchtap.store.read.attempt import AttemptFiles
from torchtap.store.read.lookup import described_sites
from torchtap.store.read.numbers import Axes, AxesCache, Block
from torchtap.store.read.results import Status, TensorRef
from torchtap.store.read.stored_tensors import StoredTensor

__all__ = ["PlacementChanges", "RankRun", "at_step", "steady"]

T = TypeVar("T")
PlacementChanges = list[tuple[int, str, Placement]]  # from a step on, in a phase
_TRIES = 5


def steady(read: Callable[[], T], refresh: Callable[[], object]) -> T:
    """Read; if merging has replaced a file meanwhile, refresh and read again."""
    for _ in range(_TRIES):
        try:
            return read()
        except FileNotFoundError:
            refresh()
    return read()


@final
class RankRun:
    """The records of one attempt of one rank; of one ``phase`` if given.

    Sites, statistics and phases that it does not have give empty answers.
    """

    def __init__(
        self, root: Folder, rank: int, attempt: int, axes: AxesCache, *, phase: str | None = None
    ) -> None:
        self.rank = rank
        self.attempt = attempt
        self._phase = phase
        folder = root.child(rank_folder(rank)).child(attempt_folder(attempt))
        self._files = AttemptFiles(folder, rank, attempt, axes)
        self._known: dict[str, Any] = {}  # derived from the files; until the next refresh
        self.refresh()

    def refresh(self) -> None:
        """Read what was written since."""
        self._files.refresh()
        self._known.clear()

    def _cached(self, name: str, derive: Callable[[], T]) -> T:
        if name not in self._known:
            self._known[name] = steady(derive, self.refresh)
        found: T = self._known[name]
        return found

    # --- the attempt --------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        return self._files.status

    @property
    def manifest(self) -> dict[str, Any]:
        return self._files.manifest

    @property
    def launch(self) -> dict[str, Any]:
        """Return which process wrote it; empty if that is not known."""
        launch = self.manifest.get("launch")
        return launch if isinstance(launch, dict) else {}

    @property
    def problems(self) -> list[str]:
        return self._files.problems()

    @property
    def lost_steps(self) -> list[tuple[int, int]]:
        """Return the ranges of steps whose files are damaged or missing."""
        return self._files.lost_steps

    def events(self) -> list[dict[str, Any]]:
        return self._cached("events", self._files.events)

    def placements(self) -> dict[str, PlacementChanges]:
        """Return, by site, which part of the whole its values are, from which step on, in which phase."""

        def derive() -> dict[str, PlacementChanges]:
            found: dict[str, PlacementChanges] = {}
            for event in self.events():
                if event.get("kind") == "placements":
                    _add_placements(found, event)
            return found

        return self._cached("placements", derive)

    def placement(self, site: str, step: int | None, phase: str) -> Placement | None:
        return at_step(self.placements().get(site, []), step, phase)

    # --- records, sites and statistics --------------------------------------------------------------------

    def _rows(self) -> npt.NDArray[np.int64]:
        """Return the rows of the clock that are shown."""
        clock = self._files.clock
        shown = np.ones(len(clock), bool) if self._phase is None else clock.phase == self._phase
        return np.flatnonzero(shown)

    def clock(self) -> np.recarray:
        """Return the clock of every record, by step."""

        def derive() -> np.recarray:
            clock, rows = self._files.clock, self._rows()
            return clock.table(rows[np.argsort(clock.step[rows], kind="stable")])

        return self._cached("clock", derive)

    def recorded_steps(self, seen: int) -> npt.NDArray[np.int64]:
        """Return the steps of the records after the first ``seen``, in the order in which they were written."""
        return self._files.clock.step[seen:]

    @property
    def phases(self) -> list[str]:
        """Return the phases, in the order of their first records."""

        def derive() -> list[str]:  # for every site of a map: a million texts are not sorted each time
            present = self._files.clock.phase[self._rows()]
            _, first = np.unique(present, return_index=True)
            return [str(present[at]) for at in sorted(first)]

        return list(self._cached("order of phases", derive))

    def phases_of_sites(self) -> dict[str, set[str]]:
        """Return the phases in which any number of each site was recorded. No values are read."""
        return self._cached("phases", self._find_phases)

    def _find_phases(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        known: set[tuple[int, str]] = set()  # axes whose sites are all known in a phase
        for start, grid in self._files.grids():
            here = self._files.clock.phase[grid.rows + start]
            for phase in self.phases:
                rows = here == phase
                if (id(grid.axes), phase) in known or not rows.any():
                    continue
                everyone = range(len(grid.axes.sites))
                present = grid.presence(everyone, lenient=True)[:, rows].any(axis=1)
                if present.all():
                    known.add((id(grid.axes), phase))
                for site in np.flatnonzero(present).tolist():
                    found.setdefault(grid.axes.sites[site], set()).add(phase)
        return found

    def site_names(self) -> dict[str, None]:
        """Return the recorded sites, in the order of execution if the session noted it."""

        def derive() -> dict[str, None]:
            found: dict[str, None] = {}
            for axes in self._all_axes():
                found.update(dict.fromkeys(axes.sites))
            for name in self._files.tensor_names:
                found.update((tensor.name.site, None) for tensor in self._files.tensors_in(name))
            return dict.fromkeys([name for name in self.site_facts() if name in found] + list(found))

        return self._cached("sites", derive)

    def _all_axes(self) -> list[Axes]:
        """Return the distinct axes of all grids: a long run has thousands of grids with the same."""

        def derive() -> list[Axes]:
            return list({id(grid.axes): grid.axes for _, grid in self._files.grids()}.values())

        return self._cached("axes", derive)

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

    def steps(self, site: str | None, phase: str | None = None) -> npt.NDArray[np.int64]:
        """Return all steps, ascending; or those at which a number or tensor of a site was recorded in a phase."""
        clock, rows = self._files.clock, self._rows()
        if site is None:
            return np.unique(clock.step[rows])

        def derive() -> npt.NDArray[np.int64]:
            shown = clock.phase[rows] == phase if phase is not None else np.ones(len(rows), bool)
            wanted = np.zeros(len(clock), bool)
            wanted[rows[shown]] = True
            found = [
                np.array([ref.step for ref in self.tensors(site) if phase in (None, ref.phase)], np.int64)
            ]
            for start, grid in self._files.grids():
                index = grid.axes.site_index.get(site)
                if index is not None:
                    own = grid.rows[grid.presence([index], lenient=True)[0]] + start
                    found.append(clock.step[own[wanted[own]]])
            return np.unique(np.concatenate(found))

        return steady(derive, self.refresh)

    # --- numbers ------------------------------------------------------------------------------------------

    def numbers(
        self,
        statistic: str,
        sites: Sequence[str],
        phase: str,
        *,
        steps: npt.NDArray[np.int64] | None = None,
        lenient: bool,
    ) -> Block:
        """Read one statistic of some sites in a phase, at all steps or at these.

        Damaged numbers are NaN if ``lenient``, else an error.
        """

        def read() -> Block:
            clock, rows = self._files.clock, self._rows()
            rows = rows[clock.phase[rows] == phase]
            if steps is not None:
                rows = rows[np.isin(clock.step[rows], steps)]
            return Block.of_grids(self._files.grids(), clock, rows, statistic, sites, lenient=lenient)

        return steady(read, self.refresh)

    # --- tensors ------------------------------------------------------------------------------------------

    def tensors(self, site: str | None) -> list[TensorRef]:
        """Return the stored tensors, or those of a site. A damaged note is a problem."""
        return steady(lambda: self._tensors(site), self.refresh)

    def _tensors(self, site: str | None) -> list[TensorRef]:
        shown = self._shown()
        found = []
        for name in self._files.tensor_names:
            for tensor in self._files.tensors_in(name):
                if (tensor.name.step, tensor.name.phase) in shown and site in (None, tensor.name.site):
                    try:
                        found.append(tensor.ref())
                    except RunError as error:
                        self._files.remark(name.file, error)
        return found

    def _shown(self) -> set[tuple[int, str]]:
        """Return the steps that have a record, each with its phase: a tensor counts only with its record."""

        def derive() -> set[tuple[int, str]]:
            clock, rows = self._files.clock, self._rows()
            return set(zip(clock.step[rows].tolist(), clock.phase[rows].tolist(), strict=True))

        return self._cached("shown", derive)

    def find(
        self,
        site: str,
        step: int | None,
        field: str,
        reduction: str | None,
        phase: str,
        among: npt.NDArray[np.int64] | None = None,
    ) -> StoredTensor | None:
        """Return the first tensor of that name at a step; without ``step``, of the largest step (``among`` these)."""

        def is_it(name: TensorName) -> bool:
            if (name.site, name.phase, name.field) != (site, phase, field):
                return False
            return step in (None, name.step) and reduction in (None, name.reduction)

        def read() -> StoredTensor | None:
            shown = self._shown()
            for name in reversed(self._files.tensor_names):
                if step is not None and not name.low <= step <= name.high:
                    continue
                tensors = [tensor for tensor in self._files.tensors_in(name) if is_it(tensor.name)]
                here = [tensor for tensor in tensors if (tensor.name.step, phase) in shown]
                if among is not None:
                    here = [tensor for tensor in here if tensor.name.step in among]
                if here:  # segments follow the training, so older ones have smaller steps
                    return max(here, key=lambda tensor: (tensor.name.step, -tensor.name.copy))
            return None

        return steady(read, self.refresh)


def _add_placements(found: dict[str, PlacementChanges], event: dict[str, object]) -> None:
    """Add the placements of an event. Anything in it that is not a placement is ignored."""
    match event:
        case {"placements": list(listed), "sites": dict(sites), "step": int(step), "phase": str(phase)}:
            known = [placement_of(each) for each in listed]
            for site, number in sites.items():
                if type(number) is int and 0 <= number < len(known):
                    placement = known[number]
                    if placement is not None:
                        found.setdefault(site, []).append((step, phase, placement))


def at_step(changes: PlacementChanges, step: int | None, phase: str) -> Placement | None:
    """Return the placement at a step; without a step, the last. A phase without any uses the other phases'."""
    own = [each for each in changes if each[1] == phase] or changes
    before = [each for each in own if step is None or each[0] <= step]
    return before[-1][2] if before else own[0][2] if own else None
