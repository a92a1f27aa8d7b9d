"""Compare one site of two recordings that may lie on ranks in different ways: DDP beside one process, TP beside FSDP.

Ranks are merged first. Then:
- a gradient of a rank's own loss is compared with so many times the other side's; a pipeline's is that of each
  micro-batch, which a schedule scales afterwards, so any whole number is taken where a stage alone has the site;
- where one rank stands for all (replicas), the others are held to the same by their statistics: one that departs
  makes the row differ, and the row names it;
- a value whose layout nobody told and that is not the other side's whole is an ``unknown part``, not a difference. In a
  pipeline it is taken from the stage that agrees, since each stage calls its own result the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from torchtap.comparison.align.pairing import KnownSite, Pair, Unaligned
from torchtap.comparison.judge.result import AGREES, Row
from torchtap.comparison.recorded.measuring import Measuring
from torchtap.comparison.recorded.recordings import Recording
from torchtap.comparison.recorded.spread import Scaled, Spread, spread_of
from torchtap.plan.names import kind_of, read_name

__all__ = ["Ranked"]

_WHOLE = 1e-5  # how near a ratio of two norms is to a whole number
_MOST_PASSES = 4096
_UNTOLD = "nobody said which part of the whole each rank has; layout= of tt.watch does"


@final
@dataclass(eq=False)
class Ranked:
    """`Measuring`, for recordings of which one or both are of several ranks."""

    plain: Measuring

    def __post_init__(self) -> None:
        self.spreads: tuple[Spread | None, Spread | None] = (
            spread_of(self.plain.reference),
            spread_of(self.plain.target),
        )
        self._sites: tuple[list[KnownSite], list[KnownSite]] = ([], [])

    def begin(self, left: list[KnownSite], right: list[KnownSite]) -> None:
        """Take notice of a step's sites."""
        self._sites = (left, right)
        self.plain.begin(left, right)

    def row(self, pair: Pair, step: int, before: float) -> Row:
        """Compare one pair; ``before`` is the largest harmless error seen so far."""
        row = self.plain.row(pair, step, before)
        if self.spreads == (None, None):
            return row
        if row.status in ("diverged", "other shape"):
            return self._otherwise(row, pair, step, before)
        return self._replicas(row, pair, step, before) if row.status in AGREES else row

    # A row that does not agree as it is.

    def _otherwise(self, row: Row, pair: Pair, step: int, before: float) -> Row:
        scaled = self._of_own_loss(row, pair, step, before, self.plain)
        if scaled is not None:
            return scaled
        for spread, site, side in self._sides(pair):
            if not spread.is_unknown(site, step):
                continue
            found = self._of_a_stage(spread, site, side, pair, step, before) if spread.in_stages else None
            if found is not None:
                return found
            if not spread.are_alike(site, step):
                return replace(row, status="unknown part", note=_UNTOLD)
        return row

    def _of_a_stage(
        self, spread: Spread, site: str, side: int, pair: Pair, step: int, before: float
    ) -> Row | None:
        """The row of the stage whose own value agrees."""
        for rank, measuring in self._stages(spread, site, side, pair, step):
            found: Row | None = measuring.row(pair, step, before)
            if found is not None and found.status == "diverged":
                found = self._of_own_loss(found, pair, step, before, measuring)
            if found is not None and found.status in AGREES:
                return replace(found, note=_joined(found.note, f"as rank {rank} has it"))
        return None

    def _stages(
        self, spread: Spread, site: str, side: int, pair: Pair, step: int
    ) -> Iterator[tuple[int, Measuring]]:
        """Each stage of one side beside the other side, and beside each of its stages where it has some, too."""
        other = self.spreads[1 - side]
        for rank in spread.holders(site, step):
            yield rank, self._of_rank(side, rank, pair, step)
            if other is not None and other.in_stages:
                theirs = pair.target if side == 0 else pair.reference
                for their_rank in other.holders(theirs, step):
                    sides: list[Recording] = [spread.ranks[rank], other.ranks[their_rank]]
                    yield rank, self._measuring(*(sides if side == 0 else sides[::-1]))

    def has_no_root(self, left: Unaligned, rows: Sequence[Row]) -> bool:
        """Whether a site of the model itself is missing only because the other side is a list of stages: what depends
        on it, the gradients of its parameters, was compared."""
        spread = self.spreads[0 if left.side == "target" else 1]
        if left.side == "rule" or read_name(left.site).path or spread is None or not spread.in_stages:
            return False
        compared = [row for row in rows if row.kind == "param_grad"]
        return not spread.has_root and bool(compared) and all(row.status in AGREES for row in compared)

    def _of_own_loss(self, row: Row, pair: Pair, step: int, before: float, by: Measuring) -> Row | None:
        if row.status != "diverged" or kind_of(pair.reference) not in ("grad_output", "grad_input"):
            return None
        for times, why in self._scales(pair, step, by):
            scaled = self._measuring(Scaled(by.reference, times), by.target)
            found = scaled.row(pair, step, before)
            if found.status in AGREES:
                return replace(found, note=_joined(found.note, f"{times:.4g} × the reference's: {why}"))
        return None

    def _scales(self, pair: Pair, step: int, by: Measuring) -> Iterator[tuple[float, str]]:
        """By what the reference's gradient has to be multiplied, where layouts say so."""
        mine, theirs = self.spreads
        of_mine = 1 if mine is None else mine.own_loss(pair.reference, step)
        of_theirs = 1 if theirs is None else theirs.own_loss(pair.target, step)
        if of_mine != of_theirs:
            yield of_theirs / of_mine, "of each rank's own loss"
        if any(spread.in_stages for spread, _, _ in self._sides(pair)):
            small = by.reference.statistics("l2", step).get(pair.reference)
            large = by.target.statistics("l2", step).get(pair.target)
            if small and large:
                yield from _whole_numbers(large / small)

    # A row that agrees, though one rank stands for all.

    def _replicas(self, row: Row, pair: Pair, step: int, before: float) -> Row:
        for spread, site, side in self._sides(pair):
            if not spread.is_shared(site, step) or spread.in_stages or spread.are_alike(site, step):
                continue
            holders = spread.holders(site, step)
            rows = {rank: self._of_rank(side, rank, pair, step).row(pair, step, before) for rank in holders}
            wrong = [rank for rank in holders if rows[rank].status in ("diverged", "other shape")]
            if wrong:
                found = rows[wrong[0]]
                return replace(found, note=_joined(f"wrong on {_ranks(wrong)} of {len(holders)}", found.note))
        return row

    # With what to measure.

    def _sides(self, pair: Pair) -> Iterator[tuple[Spread, str, int]]:
        for side, (spread, site) in enumerate(zip(self.spreads, (pair.reference, pair.target), strict=True)):
            if spread is not None:
                yield spread, site, side

    def _of_rank(self, side: int, rank: int, pair: Pair, step: int) -> Measuring:
        """One rank of a side beside the other side: beside the same rank of it where its ranks are to be alike too."""
        sides: list[Recording] = [self.plain.reference, self.plain.target]
        for spread, site, each in self._sides(pair):
            if rank in spread.ranks and (each == side or spread.is_shared(site, step)):
                sides[each] = spread.ranks[rank]
        return self._measuring(*sides)

    def _measuring(self, reference: Recording, target: Recording) -> Measuring:
        found = Measuring(reference, target, self.plain.harmless, self.plain.used)
        found.begin(*self._sites)
        return found


def _whole_numbers(ratio: float) -> Iterator[tuple[float, str]]:
    for number, invert in ((ratio, False), (1 / ratio, True)):
        times = round(number)
        if 2 <= times <= _MOST_PASSES and abs(number - times) < _WHOLE * number:
            yield (1 / times if invert else times), "of each micro-batch's own loss"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} alone" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
