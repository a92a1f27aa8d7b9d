"""Compare one site of two recordings: element by element if both kept it whole, otherwise by statistics.

The floor comes from further recordings of the reference that are known to be right, otherwise from the dtypes. With
such a default, an error that grows slowly counts as rounding; the first place where it jumps is reported.

It guarantees:
- at most two values are in memory at a time;
- every pair of sites gets a row: compared, of another shape, unreadable, or not comparable, with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import final

from torchtap.comparison.align import KnownSite, Pair
from torchtap.comparison.floor import Floor, default_floor, floor_from
from torchtap.comparison.judge import note_of, status_of
from torchtap.comparison.measures import Measures, measure, measure_streams
from torchtap.comparison.recordings import STATISTICS, Recording, relative, statistics_of
from torchtap.comparison.result import STATISTICS_ONLY, Row
from torchtap.comparison.rules import PairingRule, Side
from torchtap.comparison.values import Value, coarser, is_floating, resolution
from torchtap.errors import CompareError, RunNotFoundError, TorchtapError
from torchtap.plan.names import read_name

__all__ = ["Measuring", "blank_row", "changed"]

# From one site to the next a harmless error was not seen to grow by more than this.
JUMP = 8.0
# However gradual, an error this many times the default is no rounding.
FAR = 256.0
FARTHEST = 0.25


def blank_row(pair: Pair) -> Row:
    """A row before anything is known of its values."""
    name = read_name(pair.reference)
    return Row(
        index=pair.index,
        site=pair.reference,
        target_site=pair.target,
        module=name.path,
        kind=name.kind,
        status="not comparable",
        error=math.nan,
        floor=math.nan,
        excess=math.nan,
        how=pair.how,
    )


def changed(rule: PairingRule, side: Side, value: Value) -> Value:
    """A value as a rule wants it to be compared."""
    return Value(rule.apply(side, value.array), value.dtype)


@final
@dataclass(eq=False)
class Measuring:
    """Two recordings and what is known to be harmless, one site at a time."""

    reference: Recording
    target: Recording
    harmless: list[tuple[str, Recording]]
    used: dict[str, None] = field(default_factory=dict)  # what the floors rested on
    _dtypes: tuple[dict[str, str | None], dict[str, str | None]] = ({}, {})
    _computed: dict[tuple[int, str, int], dict[str, float]] = field(default_factory=dict)

    def begin(self, left: list[KnownSite], right: list[KnownSite]) -> None:
        """Take notice of a step's sites."""
        self._dtypes = ({site.name: site.dtype for site in left}, {site.name: site.dtype for site in right})
        self._computed.clear()

    def row(self, pair: Pair, step: int, before: float) -> Row:
        """Compare one pair; ``before`` is the largest harmless error seen so far."""
        blank = blank_row(pair)
        try:
            if pair.rule is None and not self.harmless:
                streamed = self._by_pieces(blank, step, before)
                if streamed is not None:
                    return streamed
            left = self.reference.value(pair.reference, step)
            right = self.target.value(pair.target, step)
            if left is None or right is None:
                return self._by_statistics(blank, step, before, left, right)
            return self._by_elements(blank, pair, left, right, step, before)
        except CompareError as error:
            return replace(blank, note=str(error))
        except (TorchtapError, RunNotFoundError) as error:
            return replace(blank, status="unreadable", note=str(error))
        except (OSError, ValueError, RuntimeError, KeyError, EOFError, IndexError) as error:
            # Damaged bytes may fail anywhere; the value is then unreadable, and that is evidence.
            return replace(blank, status="unreadable", note=f"{type(error).__name__}: {error}")

    def _by_elements(
        self, blank: Row, pair: Pair, left: Value, right: Value, step: int, before: float
    ) -> Row:
        if pair.rule is not None:
            left, right = changed(pair.rule, "reference", left), changed(pair.rule, "target", right)
        if left.shape != right.shape:
            note = (
                f"its shape is {tuple(right.shape)}, in the reference {tuple(left.shape)} "
                "(shapes differ; a rule with permute, slice or reshape can bring them together)"
            )
            return replace(blank, status="other shape", note=note)
        measures = measure(left, right)
        floor = self._learnt(pair, left, right, step) or _default(coarser(left.dtype, right.dtype), before)
        return self._judged(blank, measures, floor, left.dtype, right.dtype)

    def _by_pieces(self, blank: Row, step: int, before: float) -> Row | None:
        """Large stored values, never whole in memory; ``None`` when one of them cannot be read that way."""
        left = self.reference.stream(blank.site, step)
        right = None if left is None else self.target.stream(blank.target_site, step)
        if left is None or right is None or left.shape != right.shape:
            return None
        floor = _default(coarser(left.dtype, right.dtype), before)
        return self._judged(blank, measure_streams(left, right), floor, left.dtype, right.dtype)

    def _judged(self, blank: Row, measures: Measures, floor: Floor, reference: str, target: str) -> Row:
        self.used.update(dict.fromkeys(floor.sources))
        status, excess = status_of(measures, floor)
        notes = [note_of(measures)]
        if reference != target:
            notes.append(f"{reference} and {target}")
        return replace(
            blank,
            status=status,
            error=measures.rel_l2,
            floor=floor.l2,
            excess=excess,
            measures=measures,
            note="; ".join(note for note in notes if note),
        )

    def _learnt(self, pair: Pair, left: Value, right: Value, step: int) -> Floor | None:
        found: list[tuple[str, Measures | None]] = []
        for source, recording in self.harmless:
            try:
                other = recording.value(pair.reference, step)
                if other is not None and pair.rule is not None:
                    other = changed(pair.rule, "reference", other)
                if other is not None and other.shape == left.shape:
                    found.append((source, measure(left, other)))
            except (TorchtapError, KeyError):
                continue
        return floor_from(found, left.dtype, right.dtype)

    # Statistics.

    def _by_statistics(
        self, blank: Row, step: int, before: float, left: Value | None, right: Value | None
    ) -> Row:
        """Where a whole tensor is missing on one side: the largest relative change of any statistic."""
        mine = self._numbers(0, self.reference, blank.site, step, left)
        theirs = self._numbers(1, self.target, blank.target_site, step, right)
        if (resized := _resized(mine, theirs)) is not None:
            return replace(blank, status="other shape", note=resized)
        compared = [name for name in STATISTICS if name in mine and name in theirs]
        if not compared:
            return replace(blank, note="neither whole tensors nor statistics were kept on both sides")
        error = self._apart(mine, theirs)
        if math.isfinite(error) and mine.get("nans", 0.0) == mine.get("count", -1.0):
            return replace(blank, note="every element is NaN in both")
        floor = self._learnt_statistics(blank, step, mine) or _default(self._dtype(blank), before)
        self.used.update(dict.fromkeys(floor.sources))
        excess = error / (floor.l2 * floor.margin)
        row = replace(
            blank,
            status="diverged" if excess > 1.0 else "within",
            error=error,
            floor=floor.l2,
            excess=excess,
            note=STATISTICS_ONLY,
        )
        return _of_one_number(row, mine["value"], theirs["value"]) if compared == ["value"] else row

    def _numbers(
        self, side: int, recording: Recording, site: str, step: int, value: Value | None
    ) -> dict[str, float]:
        """A site's statistics, computed where only its tensor was kept."""
        if value is not None:
            key = (side, site, step)
            if key not in self._computed:
                self._computed = {**dict(list(self._computed.items())[-64:]), key: statistics_of(value)}
            return self._computed[key]
        names = (*STATISTICS, "nans", "infs", "count")
        found = {name: recording.statistics(name, step).get(site) for name in names}
        return {name: number for name, number in found.items() if number is not None}

    @staticmethod
    def _apart(mine: dict[str, float], theirs: dict[str, float]) -> float:
        if any(mine.get(name, 0.0) != theirs.get(name, 0.0) for name in ("nans", "infs")):
            return math.inf
        error = 0.0
        for name, scale_name in STATISTICS.items():
            a, b = mine.get(name), theirs.get(name)
            if a is None or b is None or (math.isnan(a) and math.isnan(b)):
                continue
            error = max(error, relative(a, b, abs(mine.get(scale_name, a) or a)))
        return error

    def _dtype(self, row: Row) -> str:
        """The coarser of the dtypes that were noted for a site; float32 where nothing was."""
        found = "float32"
        for noted in (self._dtypes[0].get(row.site), self._dtypes[1].get(row.target_site)):
            if noted is not None and is_floating(noted):
                found = coarser(found, noted)
        return found

    def _learnt_statistics(self, blank: Row, step: int, mine: dict[str, float]) -> Floor | None:
        largest, sources = 0.0, []
        for source, recording in self.harmless:
            try:
                value = recording.value(blank.site, step)
            except (TorchtapError, KeyError):
                value = None
            theirs = self._numbers(2, recording, blank.site, step, value)
            if any(name in theirs for name in STATISTICS):
                apart = self._apart(mine, theirs)
                largest = max(largest, apart if math.isfinite(apart) else 0.0)
                sources.append(source)
        if not sources:
            return None
        least = max(largest, 0.5 * resolution("float32"))
        return Floor(least, least, tuple(dict.fromkeys(sources)))


def _resized(mine: dict[str, float], theirs: dict[str, float]) -> str | None:
    """How the numbers of elements differ, where both are known."""
    if "count" not in mine or "count" not in theirs or mine["count"] == theirs["count"]:
        return None
    return f"it has {theirs['count']:.0f} elements, in the reference {mine['count']:.0f}"


def _of_one_number(row: Row, mine: float, theirs: float) -> Row:
    """Equal statistics do not prove equal values; of one number there is nothing else to know."""
    note = f"{theirs:.6g}, in the reference {mine:.6g}"
    if row.status == "within" and row.error == 0.0:
        return replace(row, status="equal", note=note)
    return replace(row, note=note)


def _default(dtype: str, before: float) -> Floor:
    """The default, raised by the error that was already there before."""
    floor = default_floor(dtype, dtype)
    grown = min(JUMP * before / floor.margin, FAR * floor.l2, max(FARTHEST / floor.margin, floor.l2))
    if grown <= floor.l2:
        return floor
    return replace(floor, l2=grown, linf=floor.linf * grown / floor.l2)
