"""The recording of one launch: its ranks' numbers and tensors put together site by site.

It guarantees:
- a number is given for a step only where every part that was recorded of the site has that step, unless ``partial``;
- of replicas one counts, the lowest rank that has the step;
- a rank is opened when something is asked of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunError
from torchtap.placement import Placement
from torchtap.ranks.assembled import Assembled, Piece, Summed
from torchtap.ranks.folding import How, RankFold, needed, way_of
from torchtap.ranks.launches import Launch
from torchtap.ranks.sharing import Sharing, share_out
from torchtap.ranks.sketch import quantile, share_of
from torchtap.store.read.results import Matrix, Series, TensorRef
from torchtap.store.read.stored_tensors import StoredTensor
from torchtap.store.read.strand import Changes, Strand, at_step
from torchtap.store.read.view import FoundTensor

__all__ = ["Launched"]

_SUMMED_FIELDS = {("histogram", "counts"), ("gram", "gram")}


@final
class Launched:
    """What the ranks of one launch recorded, as one."""

    def __init__(self, launch: Launch, open_rank: Callable[[int, list[int]], Strand]) -> None:
        self.launch = launch
        self._open = open_rank
        self._strands: dict[int, Strand] = {}
        self._holders: dict[str, tuple[int, ...]] | None = None
        self._aggregates: dict[str, How] | None = None
        self._sharings: dict[tuple[str, str], list[tuple[int, Sharing]]] = {}
        # By what ranks said: of sites that are placed alike.
        self._alike: dict[Hashable, list[tuple[int, Sharing]]] = {}
        self._placed: dict[int, dict[str, Changes]] = {}

    def strand(self, rank: int) -> Strand:
        """One rank's own recording."""
        if rank not in self._strands:
            self._strands[rank] = self._open(rank, self.launch.attempts[rank])
        return self._strands[rank]

    def strands(self) -> Iterator[Strand]:
        """All ranks' recordings, lowest first."""
        for rank in sorted(self.launch.attempts):
            yield self.strand(rank)

    @property
    def lowest(self) -> Strand:
        return self.strand(min(self.launch.attempts))

    def refresh(self) -> None:
        """See what was written since."""
        for strand in self._strands.values():
            strand.refresh()
        self._holders = None
        self._sharings.clear()
        self._alike.clear()
        self._placed.clear()

    # --- who has what -------------------------------------------------------------------------------------

    def holders(self) -> dict[str, tuple[int, ...]]:
        """The ranks that recorded anything of each site; sites in the order of the ranks' own."""
        if self._holders is None:
            found: dict[str, list[int]] = {}
            for strand in self.strands():
                for site in strand.site_names():
                    found.setdefault(site, []).append(strand.rank)
            self._holders = {site: tuple(ranks) for site, ranks in found.items()}
        return self._holders

    def sharings(self, site: str, phase: str) -> list[tuple[int, Sharing]]:
        """How the ranks' values of a site belong together, each from a step on. The first one counts before, too."""
        known = self._sharings.get((site, phase))
        if known is None:
            ranks = self.holders().get(site, ())
            alone = len(ranks) == 1 and self.launch.world <= 1
            known = [(0, Sharing((ranks,)))] if alone else self._sharings_of(site, phase, ranks)
            self._sharings[site, phase] = known
        return known

    def _sharings_of(self, site: str, phase: str, ranks: Sequence[int]) -> list[tuple[int, Sharing]]:
        changes = {rank: self._placements(rank).get(site, []) for rank in ranks}
        # A thousand sites have a handful of placements, and a rank has one object for each of those.
        same = (
            phase,
            *((rank, *((step, of, id(each)) for step, of, each in changes[rank])) for rank in ranks),
        )
        known = self._alike.get(same)
        if known is not None:
            return known
        found = self._alike[same] = _sharings_in_turn(changes, phase)
        return found

    def _placements(self, rank: int) -> dict[str, Changes]:
        """What a rank said of its sites' places, until the next refresh."""
        if rank not in self._placed:
            self._placed[rank] = self.strand(rank).placements()
        return self._placed[rank]

    def sharing(self, site: str, step: int | None, phase: str) -> Sharing:
        """How the values of a site belong together at a step."""
        known = self.sharings(site, phase)
        before = [sharing for start, sharing in known if step is None or start <= step]
        return before[-1] if before else known[0][1]

    # --- numbers ------------------------------------------------------------------------------------------

    def way(self, statistic: str, sharing: Sharing) -> How:
        """How a statistic folds over such parts."""
        if len(sharing.parts) == 1:
            return "own"
        how = way_of(statistic)
        if how == "own" and share_of(statistic) is not None and "quantiles" in self._reductions():
            return "quantile"
        if how != "own" or not sharing.is_batch:
            return how
        return self._metrics().get(statistic, "own")

    def _reductions(self) -> set[str]:
        """What the taps kept."""
        plan = self.lowest.manifest.get("plan")
        taps = plan.get("taps", ()) if isinstance(plan, dict) else ()
        keeps = [tap.get("keep") for tap in taps if isinstance(tap, dict)]
        return {str(keep.get("reduction")) for keep in keeps if isinstance(keep, dict)}

    def _metrics(self) -> dict[str, How]:
        """How metrics of the user combine, by name: over parts of a batch as over passes."""
        if self._aggregates is None:
            ways: dict[str, How] = {"mean": "mean", "sum": "sum", "min": "min", "max": "max"}
            found: dict[str, How] = {}
            plan = self.lowest.manifest.get("plan")
            for tap in plan.get("taps", ()) if isinstance(plan, dict) else ():
                keep = tap.get("keep") if isinstance(tap, dict) else None
                if isinstance(keep, dict) and keep.get("reduction") == "metric":
                    found[str(keep.get("name"))] = ways.get(str(keep.get("aggregate")), "own")
            self._aggregates = found
        return self._aggregates

    def series(self, site: str, statistic: str, phase: str, *, partial: bool) -> Series:
        """One number over the steps of a phase."""
        known = self.sharings(site, phase)
        pieces = []
        for number, (start, sharing) in enumerate(known):
            end = known[number + 1][0] if number + 1 < len(known) else None
            low = None if number == 0 else start
            found = self._series_between(site, statistic, phase, sharing, partial=partial)
            inside = np.ones(len(found.steps), bool)
            if low is not None:
                inside &= found.steps >= low
            if end is not None:
                inside &= found.steps < end
            pieces.append(Series(found.steps[inside], found.values[inside]))
        return Series(*(np.concatenate(column) for column in zip(*pieces, strict=True)))

    def _series_between(
        self, site: str, statistic: str, phase: str, sharing: Sharing, *, partial: bool
    ) -> Series:
        how = self.way(statistic, sharing)
        if how == "quantile":
            return self._quantiles(site, statistic, phase, sharing, partial=partial)
        if how == "own":
            return self._own_series(site, statistic, phase, sharing.parts[0], partial=partial)
        folded = self._fold([site], statistic, phase, sharing, how, partial=partial)
        here = folded[2][0]
        return Series(folded[0][here], folded[1][0, here])

    def _quantiles(self, site: str, statistic: str, phase: str, sharing: Sharing, *, partial: bool) -> Series:
        """A quantile from the parts' sketches, at the steps at which each part has one."""
        share = share_of(statistic)
        own = self.strand(sharing.parts[0][0]).series(site, statistic, phase, partial=partial)
        steps, values = [], []
        for step in own.steps.tolist():
            found = [self._stored(part, site, step, "sketch", "quantiles", phase) for part in sharing.parts]
            sketches = [each[1].array() for each in found if each is not None]
            if sketches and share is not None and (partial or len(sketches) == len(found)):
                steps.append(step)
                values.append(quantile(sketches, share))
        return Series(np.array(steps, np.int64), np.array(values, np.float64))

    def _own_series(
        self, site: str, statistic: str, phase: str, ranks: Sequence[int], *, partial: bool
    ) -> Series:
        """The lowest rank's, and where it has a step no more, the next one's that holds the same."""
        found = self.strand(ranks[0]).series(site, statistic, phase, partial=partial)
        if len(ranks) > 1 and self.strand(ranks[0]).status == "closed":
            return found
        for rank in ranks[1:]:
            more = self.strand(rank).series(site, statistic, phase, partial=partial)
            new = ~np.isin(more.steps, found.steps)
            if new.any():
                steps = np.concatenate([found.steps, more.steps[new]])
                order = np.argsort(steps, kind="stable")
                found = Series(steps[order], np.concatenate([found.values, more.values[new]])[order])
        return found

    def _fold(
        self, sites: Sequence[str], statistic: str, phase: str, sharing: Sharing, how: How, *, partial: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Steps, folded numbers (sites, steps), and where every part had one."""
        steps = np.unique(np.concatenate([self.strand(part[0]).steps(None) for part in sharing.parts]))
        fold = RankFold(statistic, how, (len(sites), len(steps)))
        for part in sharing.parts:
            fold.add(*self._columns(part, sites, statistic, phase, how, steps, partial=partial))
        values, whole = fold.result(1 if partial else len(sharing.parts))
        return steps, values, whole

    def _columns(
        self,
        part: Sequence[int],
        sites: Sequence[str],
        statistic: str,
        phase: str,
        how: How,
        steps: npt.NDArray[np.int64],
        *,
        partial: bool,
    ) -> tuple[dict[str, npt.NDArray[np.float64]], npt.NDArray[np.float64] | None]:
        """One part's columns at these steps, from the lowest rank that has them."""
        names = (statistic,) if how == "mean" else needed(statistic)
        blank = np.full((len(sites), len(steps)), np.nan)
        columns: dict[str, npt.NDArray[np.float64]] = {}
        for rank in part:
            strand = self.strand(rank)
            for name in set(names).intersection(strand.statistics(None)):
                own = strand.matrix(name, sites, steps, lambda _: phase, partial=partial).values
                before = columns.get(name, blank)
                columns[name] = np.where(np.isnan(before), own, before)
            if not np.isnan(columns.get(names[0], blank)).any():
                break
        if names[0] not in columns:  # kept without a count: its own presence tells
            columns[names[0]] = columns.get(statistic, blank)
        columns = {name: columns.get(name, blank) for name in names}
        weight = self._passes(part[0], steps, phase) if how == "mean" else None
        return columns, weight

    def _passes(self, rank: int, steps: npt.NDArray[np.int64], phase: str) -> npt.NDArray[np.float64]:
        """How many passes a rank made in each step."""
        clock = self.strand(rank).clock()
        own = clock.phase == phase
        passes = dict(zip(clock.step[own].tolist(), clock.passes[own].tolist(), strict=True))
        return np.array([float(max(passes.get(step, 1), 1)) for step in steps.tolist()])

    def matrix(
        self,
        statistic: str,
        sites: Sequence[str],
        steps: npt.NDArray[np.int64] | None,
        phase_of: Callable[[str], str],
        *,
        partial: bool,
    ) -> Matrix:
        """One statistic of many sites by steps; sites that are shared alike are folded together."""
        holders = self.holders()
        found: dict[str, Series] = {}
        groups: dict[tuple[Sharing, str], list[str]] = {}
        for site in (each for each in sites if each in holders):
            phase = phase_of(site)
            known = self.sharings(site, phase)
            if len(known) > 1:
                found[site] = self.series(site, statistic, phase, partial=partial)
            else:
                groups.setdefault((known[0][1], phase), []).append(site)
        for (sharing, phase), members in groups.items():
            found |= self._together(members, statistic, phase, sharing, steps, partial=partial)
        if steps is None:
            every = [series.steps for series in found.values()]
            steps = np.unique(np.concatenate(every)) if every else np.zeros(0, np.int64)
        return Matrix(list(sites), steps, _in_rows(sites, found, steps))

    def _together(
        self,
        sites: list[str],
        statistic: str,
        phase: str,
        sharing: Sharing,
        steps: npt.NDArray[np.int64] | None,
        *,
        partial: bool,
    ) -> dict[str, Series]:
        how = self.way(statistic, sharing)
        if how == "quantile":
            return {site: self._quantiles(site, statistic, phase, sharing, partial=partial) for site in sites}
        if how == "own":
            rank = sharing.parts[0][0]
            own = self.strand(rank).matrix(statistic, sites, steps, lambda _: phase, partial=partial)
            return {
                site: Series(own.steps[there], own.values[row, there])
                for row, site in enumerate(sites)
                if (there := ~np.isnan(own.values[row])).any()
            }
        at, values, whole = self._fold(sites, statistic, phase, sharing, how, partial=partial)
        return {
            site: Series(at[whole[row]], values[row, whole[row]])
            for row, site in enumerate(sites)
            if whole[row].any()
        }

    # --- tensors ------------------------------------------------------------------------------------------

    def tensors(self, site: str | None) -> list[TensorRef]:
        """Every stored tensor once, with the shape of the whole."""
        found: dict[Hashable, TensorRef] = {}
        for strand in self.strands():
            for ref in strand.tensors(site):
                found.setdefault((ref.site, ref.field, ref.reduction, ref.step, ref.phase), ref)
        return [self._whole_ref(ref) for ref in found.values()]

    def _whole_ref(self, ref: TensorRef) -> TensorRef:
        found = self.find(ref.site, ref.step, ref.field, ref.reduction, ref.phase, gaps=True)
        return ref if found is None else found.ref()

    def find(
        self, site: str, step: int | None, field: str, reduction: str | None, phase: str, *, gaps: bool
    ) -> FoundTensor | None:
        """A tensor of the whole; without ``step``, of the last step that the first part has."""
        first = self._first_stored(site, step, field, reduction, phase)
        if first is None:
            return None
        at, kind = first.name.step, first.name.reduction
        parts = self._parts_to_join(site, at, phase)
        held = [self._stored(part, site, at, field, reduction, phase) for part in parts]
        stored = [each for each in held if each is not None]
        if (kind, field) in _SUMMED_FIELDS:
            return Summed([each for _, each in stored])
        pieces = self._pieces(stored, site, at, phase) if (kind, field) == ("full", "value") else None
        if pieces is None:
            return first
        if len(stored) < len(held) and not gaps:
            lacking = [str(part[0]) for part, each in zip(parts, held, strict=True) if each is None]
            raise RunError(
                f"{site!r} at step {at} is not whole: rank {', '.join(lacking)} has no part of it there; "
                "run.rank(k).tensor(...) gives one rank's part, tt.open(path, partial=True) joins what there is"
            )
        return Assembled(pieces, gaps=gaps)

    def _first_stored(
        self, site: str, step: int | None, field: str, reduction: str | None, phase: str
    ) -> StoredTensor | None:
        """What of a tensor the ranks of the first part have stored."""
        if site not in self.holders():
            return None
        parts = self.sharing(site, step, phase).parts
        found = self._stored(parts[0], site, step, field, reduction, phase)
        return None if found is None else found[1]

    def _parts_to_join(self, site: str, step: int, phase: str) -> Sequence[Sequence[int]]:
        """The ranks of each part of a tensor; parts of a sum can be added, though their numbers cannot be folded."""
        sharing = self.sharing(site, step, phase)
        if sharing.why_own == "partial":
            placed = {rank: self.strand(rank).placement(site, step, phase) for rank in self.holders()[site]}
            sharing = share_out(placed, summed=True)
        return sharing.parts

    def _pieces(
        self, stored: Sequence[tuple[int, StoredTensor]], site: str, step: int, phase: str
    ) -> list[Piece] | None:
        """What ranks stored, with where it lies; None where it was recorded before placements were."""
        found = []
        for rank, each in stored:
            placement = self.strand(rank).placement(site, step, phase)
            if placement is None:
                return None
            found.append(Piece(rank, placement, each, int(self._passes(rank, np.array([step]), phase)[0])))
        return found

    def _stored(
        self, ranks: Sequence[int], site: str, step: int | None, field: str, reduction: str | None, phase: str
    ) -> tuple[int, StoredTensor] | None:
        """What the lowest of some ranks that hold the same has stored."""
        for rank in ranks:
            found = self.strand(rank).find(site, step, field, reduction, phase)
            if found is not None:
                return rank, found
        return None

    def placement(self, site: str, step: int | None, phase: str) -> Placement | None:
        """The placement of a site's values, as the lowest rank that has them knows it."""
        ranks = self.holders().get(site, ())
        return self.strand(ranks[0]).placement(site, step, phase) if ranks else None


def _sharings_in_turn(changes: Mapping[int, Changes], phase: str) -> list[tuple[int, Sharing]]:
    """From what ranks said of a site's place, and when: how its values belong together, each from a step on."""
    begins = sorted({step for each in changes.values() for step, of, _ in each if of == phase}) or [0]
    found: list[tuple[int, Sharing]] = []
    for step in begins:
        sharing = share_out({rank: at_step(said, step, phase) for rank, said in changes.items()})
        if not found or found[-1][1] != sharing:
            found.append((step, sharing))
    return found


def _in_rows(
    sites: Sequence[str], found: Mapping[str, Series], steps: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Series as rows over the same steps, which are sorted; NaN where one has nothing."""
    values = np.full((len(sites), len(steps)), np.nan)
    for row, site in enumerate(sites):
        own = found.get(site)
        if own is not None:
            target = np.searchsorted(steps, own.steps)
            inside = target < len(steps)
            inside[inside] &= steps[target[inside]] == own.steps[inside]
            values[row, target[inside]] = own.values[inside]
    return values
