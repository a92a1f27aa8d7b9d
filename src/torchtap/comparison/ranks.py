"""Which rank is at fault, and which mistake of a reduction explains a value that differs, where one does exactly.

Told of whole tensors alone, which are small enough to be held for every rank: an all-reduce that is missing (the ranks'
values add up to the reference's, or average to it), one that is done twice or is a sum in place of an average (as many
times the reference's as there are ranks), an average that is taken twice (one part in so many), a rank that differs
from all others, and of values in parts the rank whose part is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, final

import numpy as np
import numpy.typing as npt

from torchtap.comparison.align import KnownSite, Pair, Unaligned
from torchtap.comparison.explain import MOST, factor
from torchtap.comparison.measures import ValueStream
from torchtap.comparison.recordings import Recording, RunRecording, statistics_of
from torchtap.comparison.result import AGREES, Row
from torchtap.comparison.rows import Measuring
from torchtap.comparison.values import Value, resolution
from torchtap.placement import Placement
from torchtap.plan.names import kind_of, read_name

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["Ranked", "Scaled", "Spread", "blamed", "spread_of"]

_OF_THE_MODEL = frozenset({"input", "output", "grad_input", "grad_output"})
_OF_VALUES = frozenset({"grad_output", "grad_input"})
_PRINT = ("count", "l1", "l2", "mean", "absmax", "value", "fingerprint")
_COUNTS = frozenset({"count", "zeros", "nans", "infs", "value"})


def spread_of(recording: Recording) -> Spread | None:
    """How a recording is spread over ranks; None where one process, or one rank of several, recorded it."""
    if not isinstance(recording, RunRecording):
        return None
    run = recording.run
    return Spread(run) if run.shown_rank is None and len(run.ranks) > 1 else None


@final
@dataclass(eq=False)
class Spread:
    """A run of several ranks."""

    run: Run
    _known: tuple[int | None, dict[int, set[str]]] = (
        None,
        {},
    )  # the sites of each rank at the last step asked for

    @cached_property
    def ranks(self) -> dict[int, RunRecording]:
        """What each rank recorded, as it recorded it."""
        return {rank: RunRecording(self.run.rank(rank)) for rank in self.run.ranks}

    @cached_property
    def in_stages(self) -> bool:
        """Return True if ranks hold different modules, as the stages of a pipeline do."""
        return len({frozenset(each.run.sites()) for each in self.ranks.values()}) > 1

    def placement(self, site: str, step: int) -> Placement | None:
        """Which part of the whole the lowest rank's value is."""
        return self.run.placement(site, step)

    def holders(self, site: str, step: int) -> list[int]:
        """The ranks that have a value of a site at a step."""
        if self._known[0] != step:
            self._known = (
                step,
                {rank: {s.name for s in each.sites(step)} for rank, each in self.ranks.items()},
            )
        return [rank for rank, names in self._known[1].items() if site in names]

    def are_alike(self, site: str, step: int) -> bool:
        """Return True if all ranks that have a site have the same statistics, or tensors where only these were kept."""
        return len({self._print(rank, site, step) for rank in self.holders(site, step)}) < 2

    def _print(self, rank: int, site: str, step: int) -> tuple[float | None, ...]:
        part = self.ranks[rank]
        found = {
            name: number for name in _PRINT if (number := part.statistics(name, step).get(site)) is not None
        }
        if not found and (value := part.value(site, step)) is not None:
            found = statistics_of(value)
        return tuple(found.get(name) for name in _PRINT)

    def own_loss(self, site: str, step: int) -> int:
        """How many times as large a gradient is because it is of a rank's own loss, the mean over its own samples.

        Gradients of parameters need nothing: those before the reduction are averaged when ranks are merged.
        """
        placed = self.placement(site, step)
        if placed is None or placed.stage != "local" or kind_of(site) not in _OF_VALUES:
            return 1
        untold = self._untold(site, step)
        return prod(axis.size for axis in placed.axes if axis.share.kind == "batch" or axis.name in untold)

    def is_unknown(self, site: str, step: int) -> bool:
        """Return True if the merged numbers are not known to be those of the whole.

        Either the ranks' parts are not known and differ, or the ranks hold summands and only statistics of them.
        """
        if self._untold(site, step):
            return True
        placed = self.placement(site, step)
        if placed is None or not any(axis.share.kind == "partial" and axis.size > 1 for axis in placed.axes):
            return False
        return not any(ref.field == "value" and ref.step == step for ref in self.run.tensors(site))

    def _untold(self, site: str, step: int) -> set[str]:
        """The axes of which nobody said what they do, and along which ranks do not simply hold the same."""
        held = {rank: self.ranks[rank].run.placement(site, step) for rank in self.holders(site, step)}
        placed = {rank: each for rank, each in held.items() if each is not None}
        if len(placed) < 2 or len(placed) < len(held):
            return set()
        axes = next(iter(placed.values())).axes
        unknown = [number for number, axis in enumerate(axes) if axis.share.kind == "unknown"]
        return {axes[number].name for number in unknown if self._differ_along(number, placed, site, step)}

    def _differ_along(self, number: int, placed: Mapping[int, Placement], site: str, step: int) -> bool:
        """Return True if ranks that differ along this axis alone hold different values."""
        along: dict[object, set[tuple[float | None, ...]]] = {}
        for rank, each in placed.items():
            others = tuple(axis.at for at, axis in enumerate(each.axes) if at != number)
            along.setdefault((each.root, others), set()).add(self._print(rank, site, step))
        return any(len(prints) > 1 for prints in along.values())

    @cached_property
    def has_root(self) -> bool:
        """Whether the model's own values were recorded: of a list of stages there is no module around them all."""
        return any(not read_name(site).path for site in self.run.sites() if kind_of(site) in _OF_THE_MODEL)

    def is_shared(self, site: str, step: int) -> bool:
        """Return True if every rank that has the value should have the same: one of them stands for all when merged."""
        placed = self.placement(site, step)
        return placed is not None and all(axis.share.kind in ("replicate", "unknown") for axis in placed.axes)


@final
@dataclass(frozen=True, eq=False)
class Scaled:
    """A recording all of whose values are so many times as large."""

    recording: Recording
    times: float

    @property
    def label(self) -> str:
        return self.recording.label

    def steps(self) -> list[int]:
        return self.recording.steps()

    def sites(self, step: int) -> list[KnownSite]:
        return self.recording.sites(step)

    def value(self, site: str, step: int) -> Value | None:
        found = self.recording.value(site, step)
        return None if found is None else Value(found.array * self.times, found.dtype)

    def stream(self, site: str, step: int) -> ValueStream | None:
        return None

    def statistics(self, name: str, step: int) -> dict[str, float]:
        found = self.recording.statistics(name, step)
        return found if name in _COUNTS else {site: number * self.times for site, number in found.items()}

    def problems(self) -> list[str]:
        return self.recording.problems()

    def damage(self) -> list[str]:
        return self.recording.damage()


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


_SLACK = 64  # roundings that a sum over ranks may leave
_LEFT = 1e-5  # what an exact factor may leave unexplained, of values that were computed in float32
_MOST_RANKS = 64

Wide = npt.NDArray[np.float64]


def blamed(spread: Spread, site: str, step: int, reference: Value) -> str:
    """What the ranks did to a value that should be the reference's, in words; empty where nothing fits exactly."""
    if prod(reference.shape) > MOST or spread.placement(site, step) is None:
        return ""
    parts = _all_parts(spread, site, step)
    if parts is None:
        return ""
    right = reference.wide()
    near = _SLACK * resolution(reference.dtype)
    if spread.is_shared(site, step):
        alike = all(part.shape == right.shape for part in parts.values())
        return _of_replicas(parts, right, near) if alike else ""
    return _of_parts(spread, site, step, parts, right, near) or _factor_in_words(
        spread.run.array(site, step).astype(np.float64), right, len(parts)
    )


def _all_parts(spread: Spread, site: str, step: int) -> dict[int, Wide] | None:
    """What each rank that has a value holds; None where one cannot be read, or there is one rank, or very many."""
    holders = spread.holders(site, step)
    if not 1 < len(holders) <= _MOST_RANKS:
        return None
    values = {rank: spread.ranks[rank].value(site, step) for rank in holders}
    parts = {rank: value.wide() for rank, value in values.items() if value is not None}
    return parts if len(parts) == len(holders) else None


def _of_replicas(parts: dict[int, Wide], right: Wide, near: float) -> str:
    wrong = [rank for rank, part in parts.items() if not _is_near(part, right, near)]
    if wrong and len(wrong) < len(parts):
        return f"wrong on {_named(wrong)} of {len(parts)}"
    every = list(parts.values())
    if all(_is_near(part, every[0], near) for part in every):
        return _factor_in_words(every[0], right, len(parts))
    whole: Wide = np.sum(every, axis=0)
    if _is_near(whole, right, near):
        return f"one of {len(parts)} ranks' parts, whose sum is the reference's (an all-reduce is missing)"
    if _is_near(whole / len(parts), right, near):
        return f"one of {len(parts)} ranks' own, whose average is the reference's (an all-reduce is missing)"
    return ""


def _factor_in_words(part: Wide, right: Wide, ranks: int) -> str:
    if part.shape != right.shape:
        return ""
    times, left = factor(right, part)
    return _world_factor(times, ranks) if left <= _LEFT else ""


def _world_factor(times: float, ranks: int) -> str:
    if abs(times - ranks) <= _LEFT * ranks:
        return (
            f"{ranks} × the reference's on {ranks} ranks (summed where an average belongs, or reduced twice)"
        )
    if abs(times * ranks - 1.0) <= _LEFT:
        return (
            f"1/{ranks} of the reference's on {ranks} ranks (averaged twice, or the loss is divided as well)"
        )
    return ""


def _of_parts(spread: Spread, site: str, step: int, parts: dict[int, Wide], right: Wide, near: float) -> str:
    """The ranks whose own part is wrong, where others' are right."""
    expected = _expected(spread, site, step, parts, right)
    wrong = [rank for rank, own in expected.items() if not _is_near(parts[rank], own, near)]
    if not wrong or len(wrong) == len(parts) or len(expected) < len(parts):
        return ""
    return f"wrong in the part of {_named(wrong)} of {len(parts)}"


def _expected(spread: Spread, site: str, step: int, parts: dict[int, Wide], right: Wide) -> dict[int, Wide]:
    """What each rank's part should be; only those whose place in the whole is known."""
    found: dict[int, Wide] = {}
    start = 0
    for rank, part in parts.items():
        placed = spread.ranks[rank].run.placement(site, step)
        if placed is None or placed.flat:
            continue
        if placed.boxes is not None and len(placed.boxes) == 1:
            offset, size = placed.boxes[0]
            own = right[tuple(slice(at, at + long) for at, long in zip(offset, size, strict=True))]
        else:
            dim = _only_cut(placed)
            if dim is None or not part.ndim:
                continue
            own = right.take(range(start, min(start + part.shape[dim], right.shape[dim])), axis=dim)
            start += part.shape[dim]
        if own.shape == part.shape:
            found[rank] = own
    return found


def _only_cut(placed: Placement) -> int | None:
    """The dimension along which a value on one axis of ranks is cut; None where there are more, or none."""
    if len(placed.axes) != 1 or not placed.axes[0].share.divides:
        return None
    return placed.axes[0].share.dim or 0


def _is_near(one: Wide, other: Wide, near: float) -> bool:
    return _size(one - other) <= near * max(_size(other), 1e-300)


def _size(value: Wide) -> float:
    return float(np.linalg.norm(value.reshape(-1)))


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} alone"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"
