"""The recording of one launch: the numbers and tensors of its ranks, put together site by site.

It guarantees:
- a step has a number only if every part that was recorded of the site has that step, unless ``lenient``;
- of replicas one counts, the lowest rank that has the step;
- a rank is opened when one of its values is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunError
from torchtap.placement import Placement
from torchtap.ranks.assembled import Assembled, Piece, Summed
from torchtap.ranks.fold import How, RankFold, Sharing, needed, quantile, share_of, share_out, way_of
from torchtap.ranks.launches import Launch
from torchtap.sanitize import shown
from torchtap.store.read.lookup import TRAINING
from torchtap.store.read.numbers import Block
from torchtap.store.read.rank_run import PlacementChanges, RankRun, at_step
from torchtap.store.read.results import FoundTensor, Status, TensorRef
from torchtap.store.read.stored_tensors import StoredTensor

__all__ = ["LaunchRun", "absent_ranks"]

_SUMMED_FIELDS = {("histogram", "counts"), ("gram", "gram")}
_MOST = 20
Sharings = tuple[tuple[int, Sharing], ...]  # each from a step on; the first one counts before, too


@final
class LaunchRun:
    """The recording of the ranks of one launch."""

    def __init__(
        self, launch: Launch, open_rank: Callable[[int, int], RankRun], whole: RankRun | None = None
    ) -> None:
        self.launch = launch
        self._open = open_rank
        self._whole = whole  # of a packed run: the fold over all ranks, which is read instead of them
        self._ranks: dict[int, RankRun] = {}
        self._holders: dict[str, tuple[int, ...]] | None = None
        self._sharings: dict[tuple[str, str], Sharings] = {}
        self._alike: dict[Hashable, Sharings] = {}  # by placements: sites that are placed alike

    def rank(self, rank: int) -> RankRun:
        """Return one rank's own recording."""
        if rank not in self._ranks:
            self._ranks[rank] = self._open(rank, self.launch.attempts[rank])
        return self._ranks[rank]

    def ranks(self) -> Iterator[RankRun]:
        """Yield all ranks' recordings, lowest first."""
        for rank in sorted(self.launch.attempts):
            yield self.rank(rank)

    @property
    def lowest(self) -> RankRun:
        return self._whole or self.rank(min(self.launch.attempts))

    def _shown(self) -> Iterator[RankRun]:
        """Yield the fold if there is one, else all ranks."""
        if self._whole is None:
            yield from self.ranks()
        else:
            yield self._whole

    def refresh(self) -> None:
        """Read what was written since."""
        for run in [*self._ranks.values(), *self._shown()] if self._whole else self._ranks.values():
            run.refresh()
        self._holders = None
        self._sharings.clear()
        self._alike.clear()

    # --- the launch as one --------------------------------------------------------------------------------

    def statuses(self) -> dict[int, Status]:
        """Return how each rank stands."""
        if self._whole is None:
            return {run.rank: run.status for run in self.ranks()}
        noted = self._packed().get("statuses")
        known: dict[str, Status] = {"closed": "closed", "interrupted": "interrupted"}
        return {
            int(rank): known.get(status, "interrupted")
            for rank, status in (noted.items() if isinstance(noted, dict) else ())
            if rank.isdecimal()
        }

    def problems(self) -> list[str]:
        """Return what is damaged, lost or missing on any rank."""
        found = [problem for run in self._shown() for problem in run.problems]
        if self._whole is not None:
            noted = self._packed().get("problems")
            return found + [
                shown(str(each), 2000) for each in (noted if isinstance(noted, list) else [])[:1000]
            ]
        return found + (self.missing() if self.launch.world > 1 or len(self.launch.attempts) > 1 else [])

    def _packed(self) -> dict[str, Any]:
        packed = self.lowest.manifest.get("packed")
        return packed if isinstance(packed, dict) else {}

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the lowest rank; of the others, losses and warnings."""
        found: list[dict[str, Any]] = []
        for number, run in enumerate(self._shown()):
            events = run.events()
            if number:
                noted = (event for event in events if event.get("kind") in ("lost", "warning"))
                events = [{**event, "rank": run.rank} for event in noted]
            found += events
        return found

    def phases(self, own: npt.NDArray[np.int64] | None) -> list[str]:
        """Return the phases of the records, or of those at these steps."""
        found: dict[str, None] = {}
        for run in self._shown():
            phases = run.phases
            if own is not None and phases:
                clock = run.clock()
                here = set(clock.phase[np.isin(clock.step, own)].tolist())
                phases = [phase for phase in phases if phase in here]
            found.update(dict.fromkeys(phases))
        return list(found)

    def phases_of(self, site: str) -> set[str]:
        """Return the phases in which a number of a site was recorded, on the lowest rank that has it."""
        for run in self._shown():
            if site in run.site_names():
                return run.phases_of_sites().get(site, set())
        return set()

    def site_names(self) -> dict[str, None]:
        """Return the sites of all ranks."""
        return dict.fromkeys(self.holders()) if self._whole is None else self._whole.site_names()

    def site_facts(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each site; the shape of a value that ranks share is that of the whole."""
        found: dict[str, dict[str, Any]] = {}
        for run in self._shown():
            for site, facts in run.site_facts().items():
                if found.setdefault(site, facts).get("shape") is None:
                    found[site] = {**found[site], **facts}
        for site in self.holders() if self._whole is None and len(self.launch.attempts) > 1 else ():
            placed = self.placement(site, None, TRAINING)
            if placed is not None and placed.shape is not None:
                found[site] = {**found.get(site, {"name": site}), "shape": list(placed.shape)}
        return found

    def statistics(self, site: str | None) -> list[str]:
        """Return the statistics of a site, or of any, on any rank."""
        found: dict[str, None] = {}
        for run in self._shown():
            found.update(dict.fromkeys(run.statistics(site)))
        return list(found)

    def steps(self, site: str | None, phase: str | None = None) -> npt.NDArray[np.int64]:
        """Return all steps of any rank, or those at which something of a site was recorded in a phase."""
        every = [run.steps(site, phase) for run in self._shown() if site is None or site in run.site_names()]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *every]))

    def clock(self) -> np.recarray:
        """Return the lowest rank's clock, with the records that only other ranks have."""
        rows: list[np.ndarray] = []
        seen: set[tuple[int, str]] = set()
        for number, run in enumerate(self._shown()):
            clock = run.clock()
            names = list(zip(clock.step.tolist(), clock.phase.tolist(), strict=True))
            rows.append(np.asarray(clock)[[not number or name not in seen for name in names]])
            seen.update(names)
        table = np.concatenate(rows)
        return table[np.argsort(table["step"], kind="stable")].view(np.recarray)

    def lost_steps(self) -> list[tuple[int, int]]:
        """Return the ranges of steps whose files are damaged or missing on any rank."""
        return [each for run in self._shown() for each in run.lost_steps]

    # --- which rank holds what ----------------------------------------------------------------------------

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks that recorded anything of each site; sites in the order of the ranks' own."""
        if self._holders is None:
            found: dict[str, list[int]] = {}
            for run in self.ranks():
                for site in run.site_names():
                    found.setdefault(site, []).append(run.rank)
            self._holders = {site: tuple(ranks) for site, ranks in found.items()}
        return self._holders

    def sharings(self, site: str, phase: str) -> Sharings:
        """Return how the ranks' values of a site belong together."""
        known = self._sharings.get((site, phase))
        if known is None:
            ranks = self.holders().get(site, ())
            if len(ranks) == 1 and self.launch.world <= 1:
                known = ((0, Sharing((ranks,))),)
            else:
                changes = {rank: self.rank(rank).placements().get(site, []) for rank in ranks}
                # A thousand sites have a handful of placements, and a rank has one object for each of those.
                same = (
                    phase,
                    *((rank, *((step, of, id(each)) for step, of, each in changes[rank])) for rank in ranks),
                )
                known = self._alike.get(same)
                if known is None:
                    known = self._alike[same] = _sharings_in_turn(changes, phase)
            self._sharings[site, phase] = known
        return known

    def sharing(self, site: str, step: int | None, phase: str) -> Sharing:
        """Return how the values of a site belong together at a step."""
        known = self.sharings(site, phase)
        before = [sharing for start, sharing in known if step is None or start <= step]
        return before[-1] if before else known[0][1]

    def placement(self, site: str, step: int | None, phase: str) -> Placement | None:
        """Return the placement of a site's values on the lowest rank that has them."""
        ranks = self.holders().get(site, ())
        return self.rank(ranks[0]).placement(site, step, phase) if ranks else None

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
        """Read one statistic of some sites in a phase. Sites that are shared alike are folded together."""
        if len(self.launch.attempts) == 1 or (
            self._whole is not None and (not lenient or not self.problems())
        ):
            return self.lowest.numbers(statistic, sites, phase, steps=steps, lenient=lenient)
        holders = self.holders()
        groups: dict[Sharings, list[int]] = {}
        for row, site in enumerate(sites):
            if site in holders:
                groups.setdefault(self.sharings(site, phase), []).append(row)
        found: list[tuple[list[int], Block]] = []
        for sharings, rows in groups.items():
            members = [sites[row] for row in rows]
            pieces = [
                (start, self._of_sharing(members, statistic, phase, sharing, lenient))
                for start, sharing in sharings
            ]
            found.append((rows, _in_turn(len(rows), pieces)))
        if len(found) == 1 and found[0][0] == list(range(len(sites))):
            return found[0][1]
        return Block.stacked(len(sites), found)

    def _of_sharing(
        self, sites: Sequence[str], statistic: str, phase: str, sharing: Sharing, lenient: bool
    ) -> Block:
        if statistic == "mean" and sharing.summands:
            return self._mean_of_sum(sites, phase, sharing, lenient)
        how = self.way(statistic, sharing)
        if how == "quantile":
            return self._quantiles(sites, statistic, phase, sharing, lenient)
        if how == "own":
            return self._own(sites, statistic, phase, sharing.parts[0], lenient)
        steps = np.unique(np.concatenate([self.rank(part[0]).steps(None) for part in sharing.parts]))
        fold = RankFold(statistic, how, (len(sites), len(steps)))
        for part in sharing.parts:
            fold.add(*self._columns(part, sites, statistic, phase, how, steps, lenient))
        values, whole = fold.result(1 if lenient else len(sharing.parts))
        return Block(steps, values, whole).filled()

    def _mean_of_sum(self, sites: Sequence[str], phase: str, sharing: Sharing, lenient: bool) -> Block:
        """Return the mean of a value that is the sum of the ranks': the sum of their means, if all are finite."""
        names = ("mean", "nans", "infs")
        found = [
            [self._of_sharing(sites, name, phase, summand, lenient) for name in names]
            for summand in sharing.summands
        ]
        steps = np.unique(np.concatenate([means.steps for means, _, _ in found]))
        total = np.zeros((len(sites), len(steps)))
        there = np.ones(total.shape, np.bool_)
        for means, nans, infs in found:
            own = means.at(steps)
            total += np.where(own.there, own.values, 0.0)
            there &= own.there
            for count in (nans.at(steps), infs.at(steps)):
                there &= ~(count.there & (count.values > 0))
        return Block(steps, total / len(found) if sharing.averaged else total, there).filled()

    def is_whole(self, site: str, statistic: str, step: int | None, phase: str) -> bool:
        """Return True if a statistic is that of the whole value, False if it is only that of some ranks' parts."""
        if self.launch.world <= 1 and len(self.launch.attempts) == 1:
            return True
        sharing = self.sharing(site, step, phase)
        return sharing.is_whole(statistic, self.way(statistic, sharing))

    def way(self, statistic: str, sharing: Sharing) -> How:
        """Return how a statistic folds over such parts."""
        if len(sharing.parts) == 1:
            return "own"
        how = way_of(statistic)
        keeps = self._keeps()
        if (
            how == "own"
            and share_of(statistic) is not None
            and any(keep.get("reduction") == "quantiles" for keep in keeps)
        ):
            return "quantile"
        if how != "own" or not sharing.is_batch:
            return how
        # Metrics of the user combine over parts of a batch as they do over passes.
        ways: dict[str, How] = {"mean": "mean", "sum": "sum", "min": "min", "max": "max"}
        for keep in keeps:
            if keep.get("reduction") == "metric" and str(keep.get("name")) == statistic:
                return ways.get(str(keep.get("aggregate")), "own")
        return "own"

    def _keeps(self) -> list[dict[str, Any]]:
        """Return the reductions of the plan's taps, as the manifest has them."""
        plan = self.lowest.manifest.get("plan")
        taps = plan.get("taps", ()) if isinstance(plan, dict) else ()
        keeps = [tap.get("keep") for tap in taps if isinstance(tap, dict)]
        return [keep for keep in keeps if isinstance(keep, dict)]

    def _own(
        self, sites: Sequence[str], statistic: str, phase: str, ranks: Sequence[int], lenient: bool
    ) -> Block:
        """Return the lowest rank's numbers; at steps that it lacks, those of the next rank that holds the same."""
        found = self.rank(ranks[0]).numbers(statistic, sites, phase, lenient=lenient)
        if self.rank(ranks[0]).status == "closed":
            return found
        for rank in ranks[1:]:
            more = self.rank(rank).numbers(statistic, sites, phase, lenient=lenient)
            found = Block.joined(len(sites), [found, more.kept(~np.isin(more.steps, found.steps))])
        return found

    def _quantiles(
        self, sites: Sequence[str], statistic: str, phase: str, sharing: Sharing, lenient: bool
    ) -> Block:
        """Compute a quantile from the parts' sketches, at the steps at which each part has one."""
        share = share_of(statistic) or 0.0
        own = self.rank(sharing.parts[0][0]).numbers(statistic, sites, phase, lenient=lenient).once()
        found = Block.empty(len(sites), own.steps)
        for row, column in np.argwhere(own.there).tolist():
            held = [
                self._stored(part, sites[row], int(own.steps[column]), "sketch", "quantiles", phase)
                for part in sharing.parts
            ]
            sketches = [each[1].array() for each in held if each is not None]
            if sketches and (lenient or len(sketches) == len(held)):
                found.values[row, column], found.there[row, column] = quantile(sketches, share), True
        return found.filled()

    def _columns(
        self,
        part: Sequence[int],
        sites: Sequence[str],
        statistic: str,
        phase: str,
        how: How,
        steps: npt.NDArray[np.int64],
        lenient: bool,
    ) -> tuple[dict[str, npt.NDArray[np.float64]], npt.NDArray[np.float64] | None]:
        """Return one part's columns at these steps, from the lowest rank that has them."""
        names = (statistic,) if how == "mean" else needed(statistic)
        blank = np.full((len(sites), len(steps)), np.nan)
        columns: dict[str, npt.NDArray[np.float64]] = {}
        for rank in part:
            run = self.rank(rank)
            for name in set(names).intersection(run.statistics(None)):
                own = run.numbers(name, sites, phase, lenient=lenient).at(steps).values
                before = columns.get(name, blank)
                columns[name] = np.where(np.isnan(before), own, before)
            if not np.isnan(columns.get(names[0], blank)).any():
                break
        if names[0] not in columns:  # kept without a count: its own presence decides
            columns[names[0]] = columns.get(statistic, blank)
        columns = {name: columns.get(name, blank) for name in names}
        return columns, self._passes(part[0], steps, phase) if how == "mean" else None

    def _passes(self, rank: int, steps: npt.NDArray[np.int64], phase: str) -> npt.NDArray[np.float64]:
        """Return how many passes a rank made in each step."""
        clock = self.rank(rank).clock()
        own = clock.phase == phase
        passes = dict(zip(clock.step[own].tolist(), clock.passes[own].tolist(), strict=True))
        return np.array([float(max(passes.get(step, 1), 1)) for step in steps.tolist()])

    # --- tensors ------------------------------------------------------------------------------------------

    def tensors(self, site: str | None) -> list[TensorRef]:
        """Return every stored tensor once, with the shape of the whole."""
        if len(self.launch.attempts) == 1:
            return self.lowest.tensors(site)
        found: dict[Hashable, TensorRef] = {}
        for run in self.ranks():
            for ref in run.tensors(site):
                found.setdefault((ref.site, ref.field, ref.reduction, ref.step, ref.phase), ref)
        whole = []
        for ref in found.values():
            joined = self.find(ref.site, ref.step, ref.field, ref.reduction, ref.phase, gaps=True)
            whole.append(ref if joined is None else joined.ref())
        return whole

    def find(
        self,
        site: str,
        step: int | None,
        field: str,
        reduction: str | None,
        phase: str,
        *,
        gaps: bool,
        among: npt.NDArray[np.int64] | None = None,
    ) -> FoundTensor | None:
        """Return a tensor of the whole; without ``step``, of the last step (``among`` these) of the first part."""
        if site not in self.holders():
            return None
        parts: Sequence[Sequence[int]] = self.sharing(site, step, phase).parts
        first = self._stored(parts[0], site, step, field, reduction, phase, among)
        if first is None or len(self.launch.attempts) == 1:
            return None if first is None else first[1]
        at, kind = first[1].name.step, first[1].name.reduction
        parts = self._parts_to_join(site, at, phase)
        held = [self._stored(part, site, at, field, reduction, phase) for part in parts]
        stored = [each for each in held if each is not None]
        if (kind, field) in _SUMMED_FIELDS:
            return Summed([each for _, each in stored])
        pieces = self._pieces(stored, site, at, phase) if (kind, field) == ("full", "value") else None
        if pieces is None:
            return first[1]
        if len(stored) < len(held) and not gaps:
            lacking = [str(part[0]) for part, each in zip(parts, held, strict=True) if each is None]
            raise RunError(
                f"{site!r} at step {at} is not whole: rank {', '.join(lacking)} has no part of it there; "
                "run.rank(k).tensor(...) gives one rank's part, tt.open(path, partial=True) joins what there is"
            )
        return Assembled(pieces, gaps=gaps)

    def _parts_to_join(self, site: str, step: int, phase: str) -> Sequence[Sequence[int]]:
        """Return the ranks of each part of a tensor. Parts of a sum can be added, though their numbers cannot."""
        sharing = self.sharing(site, step, phase)
        if sharing.why_own == "partial":
            placed = {rank: self.rank(rank).placement(site, step, phase) for rank in self.holders()[site]}
            sharing = share_out(placed, summed=True)
        return sharing.parts

    def _pieces(
        self, stored: Sequence[tuple[int, StoredTensor]], site: str, step: int, phase: str
    ) -> list[Piece] | None:
        """Return what ranks stored, with its position; None if it was recorded before placements were."""
        found = []
        for rank, each in stored:
            placement = self.rank(rank).placement(site, step, phase)
            if placement is None:
                return None
            found.append(Piece(rank, placement, each, int(self._passes(rank, np.array([step]), phase)[0])))
        return found

    def _stored(
        self,
        ranks: Sequence[int],
        site: str,
        step: int | None,
        field: str,
        reduction: str | None,
        phase: str,
        among: npt.NDArray[np.int64] | None = None,
    ) -> tuple[int, StoredTensor] | None:
        """Return what the lowest of some ranks that hold the same has stored."""
        for rank in ranks:
            found = self.rank(rank).find(site, step, field, reduction, phase, among)
            if found is not None:
                return rank, found
        return None

    # --- what is missing ----------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Describe what the launch lacks: ranks, steps of a rank, parts of sites."""
        absent = absent_ranks(sorted(self.launch.attempts), self.launch.world)
        return [*absent, *self._missing_steps(), *self._missing_parts()][:1000]

    def _missing_steps(self) -> list[str]:
        """Describe ranks whose last step is before the others', and steps that a rank lacks in between."""
        steps = {run.rank: run.steps(None) for run in self.ranks()}
        if len(steps) < 2 or any(run.status == "recording" for run in self.ranks()):
            return []
        every = np.unique(np.concatenate(list(steps.values())))
        lacking = {rank: np.setdiff1d(every, own).tolist() for rank, own in steps.items()}
        return [
            f"rank {rank} has no record of step{'s' if len(gone) > 1 else ''} {_ranges(gone)}, which other ranks have: "
            "numbers and tensors that need its part are left out there; partial=True folds what there is"
            for rank, gone in lacking.items()
            if gone
        ]

    def _missing_parts(self) -> list[str]:
        """Describe sites of which a part is nowhere, though every rank recorded something."""
        if self.launch.absent:
            return []
        lacking: dict[tuple[str, ...], list[str]] = {}
        for site in self.holders():
            sharing = self.sharing(site, None, TRAINING)
            if len(sharing.parts) < sharing.expected and not self._covered(site, sharing):
                lacking.setdefault(sharing.missing, []).append(site)
        return [
            f"{len(sites)} site(s), the first is {sites[0]!r}, lack the part at {', '.join(missing) or 'some place'}: "
            "what is shown is folded of the others"
            for missing, sites in list(lacking.items())[:_MOST]
        ]

    def _covered(self, site: str, sharing: Sharing) -> bool:
        """Return True if the boxes of the parts fill the whole: a rank may hold no element of a small parameter."""
        placed = [self.rank(part[0]).placement(site, None, TRAINING) for part in sharing.parts]
        boxed = [
            each for each in placed if each is not None and each.boxes is not None and each.shape is not None
        ]
        if len(boxed) < len(placed):
            return False
        held = sum(prod(box.size) for each in boxed for box in each.boxes or ())
        return held >= prod(boxed[0].shape or ())


def absent_ranks(here: Sequence[int], world: object) -> list[str]:
    """Describe the processes of a launch that recorded nothing."""
    if type(world) is not int or not 1 < world < 2**20 or len(here) >= world:
        return []
    present = set(here)
    absent = [rank for rank in range(world) if rank not in present]
    return [
        f"{world} processes trained, {_ranks(absent)} recorded nothing: what is divided over ranks is that of "
        f"{_ranks(here)} alone. Watch the model on every rank"
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ``1, 4 to 9``. Long lists are cut."""
    texts = []
    for _, group in groupby(enumerate(numbers), key=lambda each: each[1] - each[0]):
        run = [number for _, number in group]
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return ", ".join(texts[:_MOST]) + (" ..." if len(texts) > _MOST else "")


def _sharings_in_turn(changes: Mapping[int, PlacementChanges], phase: str) -> Sharings:
    """Return how a site's values belong together, each from a step on, from the ranks' placements."""
    begins = sorted({step for each in changes.values() for step, of, _ in each if of == phase}) or [0]
    found: list[tuple[int, Sharing]] = []
    for step in begins:
        sharing = share_out({rank: at_step(stated, step, phase) for rank, stated in changes.items()})
        if not found or found[-1][1] != sharing:
            found.append((step, sharing))
    return tuple(found)


def _in_turn(sites: int, pieces: Sequence[tuple[int, Block]]) -> Block:
    """Join blocks, each from a step on until the next one begins; the first one counts before, too."""
    kept = []
    for number, (start, block) in enumerate(pieces):
        inside = block.steps >= start if number else np.ones(len(block.steps), np.bool_)
        if number + 1 < len(pieces):
            inside &= block.steps < pieces[number + 1][0]
        kept.append(block.kept(inside))
    return Block.joined(sites, kept)
