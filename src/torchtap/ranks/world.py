"""All ranks of a training as one recording, launch after launch. A `View`.

A step that a later launch recorded again is the later one's, on every rank: worlds do not mix. What is missing of the
whole (ranks, steps of a rank, parts of a site) is named in ``problems``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunFormatError
from torchtap.placement import Placement
from torchtap.ranks.launched import Launched
from torchtap.ranks.launches import find_launches
from torchtap.ranks.missing import missing_parts
from torchtap.ranks.tabled import table_of_series
from torchtap.store.files.folder import Folder
from torchtap.store.read.doubt import Ranges, doubt_about, inside, joined
from torchtap.store.read.grids import AxesCache
from torchtap.store.read.phases import TRAINING, first_phase
from torchtap.store.read.results import Matrix, Series, Table, TensorRef
from torchtap.store.read.strand import Strand
from torchtap.store.read.view import FoundTensor, Status

__all__ = ["World"]


@final
class World:
    """What all ranks wrote."""

    def __init__(
        self,
        root: Folder,
        path: str,
        ranks: Sequence[int],
        *,
        phase: str | None = None,
        partial: bool = False,
    ) -> None:
        self.path = path
        self._root = root
        self._ranks = list(ranks)
        self._phase = phase
        self._partial = partial
        self._axes: AxesCache = {}
        self._launched: dict[tuple[tuple[int, int], ...], Launched] = {}
        self._steps: list[npt.NDArray[np.int64]] | None = None
        self.refresh()

    def refresh(self) -> None:
        known = self._launched
        self._launched = {}
        for launch in find_launches(self._root, self._ranks):
            # The first attempt of its lowest rank names a launch: ranks may still join it.
            rank = min(launch.attempts)
            key = ((rank, launch.attempts[rank][0]),)
            before = known.get(key)
            if before is not None and before.launch == launch:
                before.refresh()
            self._launched[key] = (
                before if before is not None and before.launch == launch else self._made(launch)
            )
        if not self._launched:
            raise RunFormatError(f"{self.path}: no rank has an attempt")
        self._steps = None

    def _made(self, launch: Any) -> Launched:
        def open_rank(rank: int, attempts: list[int]) -> Strand:
            return Strand(
                self._root,
                self.path,
                rank,
                axes=self._axes,
                only=attempts,
                phase=self._phase,
                partial=self._partial,
            )

        return Launched(launch, open_rank)

    @property
    def launches(self) -> list[Launched]:
        """The launches, oldest first."""
        return list(self._launched.values())

    @property
    def _last(self) -> Launched:
        return self.launches[-1]

    def follow(self, poll: float) -> Iterator[int]:
        return self._last.lowest.follow(poll)

    # --- which launch has a step --------------------------------------------------------------------------

    def _owned(self) -> list[npt.NDArray[np.int64]]:
        """For each launch the steps that no later one has recorded again."""
        if self._steps is None:
            later = np.zeros(0, np.int64)
            found: list[npt.NDArray[np.int64]] = []
            for launched in reversed(self.launches):
                own = np.unique(np.concatenate([strand.steps(None) for strand in launched.strands()]))
                found.append(np.setdiff1d(own, later))
                later = np.union1d(later, own)
            self._steps = found[::-1]
        return self._steps

    def _in_turn(self) -> Iterator[tuple[Launched, npt.NDArray[np.int64] | None]]:
        """Each launch with the steps that count; None for all."""
        launches = self.launches
        if len(launches) == 1:
            yield launches[0], None
        else:
            yield from zip(launches, self._owned(), strict=True)

    def _doubted(self) -> list[Ranges]:
        """For each launch the steps that a later one recorded again and has lost: an earlier one's do not count."""
        later: list[tuple[int, int]] = []
        found: list[Ranges] = []
        for launched in reversed(self.launches):
            found.append(later)
            later = joined([*later, *(each for strand in launched.strands() for each in strand.lost_steps)])
        return found[::-1]

    def _doubtful(
        self, steps: npt.NDArray[np.int64], lost: Ranges, *, partial: bool
    ) -> npt.NDArray[np.bool_]:
        """Which of a launch's own steps are in doubt. That is an error, unless the caller wants what there is."""
        doubt = inside(steps, lost)
        if doubt.any() and not partial:
            raise doubt_about(steps[doubt])
        return doubt

    def _at(self, step: int) -> Launched:
        """The launch that a step belongs to."""
        for launched, steps in self._in_turn():
            if steps is None or step in steps:
                return launched
        return self._last

    # --- what it is ---------------------------------------------------------------------------------------

    @property
    def statuses(self) -> dict[int, Status]:
        return {strand.rank: strand.status for strand in self._last.strands()}

    @property
    def status(self) -> Status:
        found = set(self.statuses.values())
        if "recording" in found:
            return "recording"
        return "interrupted" if "interrupted" in found else "closed"

    @property
    def manifest(self) -> dict[str, Any]:
        return self._last.lowest.manifest

    @property
    def attempts(self) -> list[int]:
        return sorted(
            {each for launched in self.launches for own in launched.launch.attempts.values() for each in own}
        )

    @property
    def phases(self) -> list[str]:
        found: dict[str, None] = {}
        for launched in self.launches:
            for strand in launched.strands():
                found.update(dict.fromkeys(strand.phases))
        return list(found)

    def phase_of(self, site: str) -> str:
        phases = self.phases
        if len(phases) <= 1:
            return phases[0] if phases else TRAINING
        recorded: set[str] = set()
        for launched in self.launches:
            for rank in launched.holders().get(site, ())[:1]:
                recorded |= launched.strand(rank).phases_of_sites().get(site, set())
        return first_phase(phases, recorded)

    @property
    def problems(self) -> list[str]:
        found = [
            problem
            for launched in self.launches
            for strand in launched.strands()
            for problem in strand.problems
        ]
        return [*found, *missing_parts(self._last)]

    def events(self) -> list[dict[str, Any]]:
        """Those of the lowest rank of each launch; of the others what was lost."""
        found: list[dict[str, Any]] = []
        for launched in self.launches:
            lowest = launched.lowest
            found += lowest.events()
            for strand in launched.strands():
                if strand is not lowest:
                    told = (event for event in strand.events() if event.get("kind") in ("lost", "warning"))
                    found += [{**event, "rank": strand.rank} for event in told]
        return found

    def site_names(self) -> dict[str, None]:
        found: dict[str, None] = {}
        for launched in self.launches:
            found.update(dict.fromkeys(launched.holders()))
        return found

    def site_facts(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for strand in self._last.strands():
            for site, facts in strand.site_facts().items():
                if found.setdefault(site, facts).get("shape") is None:
                    found[site] = {**found[site], **facts}
        for site, ranks in self._last.holders().items():
            placed = self._last.strand(ranks[0]).placement(site, None, TRAINING)
            if placed is not None and placed.shape is not None:
                found[site] = {**found.get(site, {"name": site}), "shape": list(placed.shape)}
        return found

    def placement(self, site: str, step: int | None, phase: str) -> Placement | None:
        launched = self._last if step is None else self._at(step)
        return launched.placement(site, step, phase)

    def statistics(self, site: str | None) -> list[str]:
        found: dict[str, None] = {}
        for launched in self.launches:
            ranks = (
                launched.holders().get(site, ())
                if site is not None
                else tuple(sorted(launched.launch.attempts))
            )
            for rank in ranks:
                found.update(dict.fromkeys(launched.strand(rank).statistics(site)))
        return list(found)

    def steps(self, site: str | None) -> npt.NDArray[np.int64]:
        found = [np.zeros(0, np.int64)]
        for launched, own in self._in_turn():
            ranks = tuple(launched.launch.attempts) if site is None else launched.holders().get(site, ())
            for rank in ranks:
                steps = launched.strand(rank).steps(site)
                found.append(steps if own is None else np.intersect1d(steps, own))
        return np.unique(np.concatenate(found))

    def clock(self) -> np.recarray:
        """The lowest rank's, and of steps that it does not have the next one's."""
        rows: list[np.ndarray] = []
        for launched, own in self._in_turn():
            seen: set[tuple[int, str]] = set()
            for strand in launched.strands():
                clock = strand.clock()
                names = list(zip(clock.step.tolist(), clock.phase.tolist(), strict=True))
                inside = own is None or np.isin(clock.step, own)
                new = np.array([name not in seen for name in names], bool) & inside
                rows.append(np.asarray(clock)[new])
                seen.update(names)
        table = np.concatenate(rows)
        return table[np.argsort(table["step"], kind="stable")].view(np.recarray)

    # --- numbers ------------------------------------------------------------------------------------------

    def series(self, site: str, statistic: str, phase: str, *, partial: bool) -> Series:
        steps, values = [np.zeros(0, np.int64)], [np.zeros(0)]
        lenient = partial or self._partial
        for (launched, own), lost in zip(self._in_turn(), self._doubted(), strict=True):
            if site in launched.holders():
                found = launched.series(site, statistic, phase, partial=lenient)
                kept = slice(None) if own is None else np.isin(found.steps, own)
                doubt = self._doubtful(found.steps[kept], lost, partial=lenient)
                steps.append(found.steps[kept])
                values.append(np.where(doubt, np.nan, found.values[kept]))
        at, of = np.concatenate(steps), np.concatenate(values)
        order = np.argsort(at, kind="stable")
        return Series(at[order], of[order])

    def matrix(
        self,
        statistic: str,
        sites: Sequence[str],
        steps: npt.NDArray[np.int64] | None,
        phase_of: Callable[[str], str],
        *,
        partial: bool,
    ) -> Matrix:
        lenient = partial or self._partial
        found = [
            (launched.matrix(statistic, sites, steps, phase_of, partial=lenient), own)
            for launched, own in self._in_turn()
        ]
        if len(found) == 1:
            return found[0][0]
        kept = [(each.steps if own is None else np.intersect1d(each.steps, own), each) for each, own in found]
        wanted = np.unique(np.concatenate([at for at, _ in kept])) if steps is None else np.unique(steps)
        values = np.full((len(sites), len(wanted)), np.nan)
        for (at, each), lost in zip(kept, self._doubted(), strict=True):
            own_values = each.values[:, np.searchsorted(each.steps, at)]
            recorded = ~np.isnan(own_values).all(axis=0)
            doubt = np.zeros(len(at), bool)
            doubt[recorded] = self._doubtful(at[recorded], lost, partial=lenient)
            values[:, np.searchsorted(wanted, at)] = np.where(doubt, np.nan, own_values)
        return Matrix(list(sites), wanted, values)

    def table(self, sites: list[str], statistics: list[str], *, partial: bool) -> Table:
        return table_of_series(self, sites, statistics, partial=partial)

    # --- tensors ------------------------------------------------------------------------------------------

    def tensors(self, site: str | None) -> list[TensorRef]:
        found: list[TensorRef] = []
        for (launched, own), lost in zip(self._in_turn(), self._doubted(), strict=True):
            refs = [ref for ref in launched.tensors(site) if own is None or ref.step in own]
            if self._partial:
                doubt = inside(np.array([ref.step for ref in refs], np.int64), lost)
                refs = [ref for ref, doubted in zip(refs, doubt.tolist(), strict=True) if not doubted]
            found += refs
        return found

    def find(
        self, site: str, step: int | None, field: str, reduction: str | None, phase: str
    ) -> FoundTensor | None:
        searched = self.launches if step is None else [self._at(step)]
        for launched in reversed(searched):
            found = launched.find(site, step, field, reduction, phase, gaps=self._partial)
            if found is not None:
                lost = self._doubted()[self.launches.index(launched)]
                self._doubtful(np.array([found.ref().step], np.int64), lost, partial=False)
                return found
        return None
