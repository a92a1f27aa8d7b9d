"""Compare two recordings: no model is run, so everything rests on what was kept.

Whole tensors are measured element by element; where only statistics were kept, those are compared. The floor
comes from further recordings of the reference that are known to be right (a repeat, a run with perturbed inputs,
a high-precision one), else from the dtypes. With such a default an error that grows little by little is taken for
rounding; what is named is the first place where it jumps.

It guarantees:
- at most two values are in memory at a time;
- a site that was not compared is listed with the reason and never counts as equal;
- when nothing at all could be compared, that is an error.

Not here: live models (`live`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from torchtap.comparison.align.pairing import Alignment, Pair, Unaligned, align
from torchtap.comparison.align.rules import Rule
from torchtap.comparison.judge.result import COMPARED, Comparison, First, Row
from torchtap.comparison.judge.verdict import sentence, status_of
from torchtap.comparison.measure.floor import Floor, default_floor, floor_from
from torchtap.comparison.measure.measures import Measures, coarser, measure, resolution
from torchtap.comparison.measure.profile import Profile, locate
from torchtap.comparison.measure.streams import measure_streams
from torchtap.comparison.recorded.recordings import Recording, RunRecording
from torchtap.errors import CompareError, TorchtapError
from torchtap.names import paths_around, read_name

__all__ = ["compare_recordings"]

# From one site to the next a harmless error was not seen to grow by more than this.
JUMP = 8.0
# However gradual, an error this many times the default is no rounding.
FAR = 256.0
FARTHEST = 0.25
# What a module made its value from.
_GIVEN = {"output": "input", "grad_input": "grad_output", "param_grad": "grad_output"}
# A statistic sums over many elements, so it is steadier than the elements; these are compared, each by its own scale.
_STATISTICS = {
    "l2": "l2",
    "rms": "rms",
    "std": "rms",
    "absmax": "absmax",
    "mean": "rms",
    "min": "absmax",
    "max": "absmax",
}


def compare_recordings(
    reference: Recording,
    target: Recording,
    *,
    rules: Sequence[str | Rule] = (),
    harmless: Iterable[tuple[str, Recording]] = (),
    only: Sequence[int] | None = None,
) -> Comparison:
    """Compare step by step, up to the first step at which something diverges."""
    steps, problems = _common_steps(reference, target, only)
    problems += [*reference.problems(), *target.problems()]
    work = _Work(reference, target, tuple(rules), list(harmless))
    seen: list[int] = []
    for step in steps:
        found = work.step(step)
        seen.append(step)
        if any(row.status == "diverged" for row in found):
            break
    rows = tuple(work.rows)
    if not any(row.status in COMPARED for row in rows):
        raise CompareError(_nothing(reference, target, work, rows))
    several = len(steps) > 1
    first = work.first(rows)
    if several:
        rows = tuple(replace(row, step=seen[-1]) for row in rows)
        first = None if first is None else replace(first, step=seen[-1])
    left = len(work.unaligned) + sum(row.status not in COMPARED for row in rows)
    verdict = sentence(first, rows, profile=None if first is None else first.where, left=left)
    if several and first is None:
        verdict = verdict[:-1] + f", over {len(seen)} steps."
    elif several:
        verdict = verdict[:-1] + f"; the {len(seen) - 1} steps before agree." if len(seen) > 1 else verdict
    return Comparison(
        reference=reference.label,
        target=target.label,
        rows=rows,
        first=first,
        verdict=verdict,
        basis=work.basis(),
        unaligned=tuple(work.unaligned),
        problems=tuple(problems),
        steps=tuple(seen),
    )


def _common_steps(
    reference: Recording, target: Recording, only: Sequence[int] | None
) -> tuple[list[int], list[str]]:
    left, right = reference.steps(), target.steps()
    for recording, steps in ((reference, left), (target, right)):
        if not steps:
            raise CompareError(f"{recording.label} has no recorded steps; there is nothing to compare")
    common = sorted(set(left) & set(right))
    if only is not None:
        absent = sorted(set(only) - set(common))
        if absent:
            raise CompareError(f"step {absent[0]} is not in both; steps in both: {_some(common)}")
        return sorted(only), []
    if not common:
        raise CompareError(f"no step is in both: the reference has {_some(left)}, the target {_some(right)}")
    problems = []
    for recording, steps in ((reference, left), (target, right)):
        extra = sorted(set(steps) - set(common))
        if extra:
            problems.append(
                f"{recording.label}: {len(extra)} steps are not in the other recording ({_some(extra)})"
            )
    return common, problems


def _some(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:6]))
    return f"{shown} ... {steps[-1]}" if len(steps) > 6 else shown or "none"


def _nothing(reference: Recording, target: Recording, work: _Work, rows: tuple[Row, ...]) -> str:
    if rows:
        why = rows[0].note or rows[0].status
        return f"none of the {len(rows)} sites in both could be compared; {rows[0].site}: {why}"
    example = next((f" ({u.site}: {u.why})" for u in work.unaligned), "")
    return (
        f"no site of {reference.label} could be paired with one of {target.label}{example}; "
        "are these recordings of the same model? A rule such as 'model.*=*' says which names belong together"
    )


@final
@dataclass(eq=False)
class _Work:
    """One comparison under way."""

    reference: Recording
    target: Recording
    rules: tuple[str | Rule, ...]
    harmless: list[tuple[str, Recording]]
    rows: list[Row] = field(default_factory=list)
    unaligned: list[Unaligned] = field(default_factory=list)
    used: dict[str, None] = field(default_factory=dict)
    current: int = 0
    _aligned: dict[object, Alignment] = field(default_factory=dict)
    _dtypes: tuple[dict[str, str | None], dict[str, str | None]] = ({}, {})

    def step(self, step: int) -> list[Row]:
        """Compare one step; the rows of the last step are the ones that are kept."""
        self.current = step
        left, right = self.reference.sites(step), self.target.sites(step)
        key = (tuple(left), tuple(right))
        if key not in self._aligned:
            self._aligned = {key: align(left, right, self.rules)}
        alignment = self._aligned[key]
        self.unaligned = list(alignment.unaligned)
        self._dtypes = ({site.name: site.dtype for site in left}, {site.name: site.dtype for site in right})
        self.rows = []
        worst_before = 0.0
        for pair in alignment.pairs:
            row = self._row(pair, step, worst_before)
            self.rows.append(row)
            if row.status == "within" and math.isfinite(row.error):
                worst_before = max(worst_before, row.error)
        return self.rows

    def _row(self, pair: Pair, step: int, before: float) -> Row:
        name = read_name(pair.reference)
        blank = Row(
            index=pair.index,
            site=pair.reference,
            target_site=pair.target,
            module=name.path,
            kind=name.kind,
            status="not compared",
            error=math.nan,
            floor=math.nan,
            excess=math.nan,
            how=pair.how,
        )
        try:
            if pair.rule is None and not self.harmless:
                streamed = self._by_pieces(blank, step, before)
                if streamed is not None:
                    return streamed
            left = self.reference.tensor(pair.reference, step)
            right = self.target.tensor(pair.target, step)
            if left is None or right is None:
                return self._by_statistics(blank, step, before)
            return self._by_elements(blank, pair, left, right, step, before)
        except TorchtapError as error:
            return replace(blank, note=str(error))

    def _by_elements(
        self, blank: Row, pair: Pair, left: Tensor, right: Tensor, step: int, before: float
    ) -> Row:
        if pair.rule is not None:
            left, right = pair.rule.apply("reference", left), pair.rule.apply("target", right)
        measures = measure(left, right)
        floor = self._learnt(pair, left, right, step) or _default(coarser(left.dtype, right.dtype), before)
        return self._judged(blank, measures, floor, left.dtype, right.dtype)

    def _by_pieces(self, blank: Row, step: int, before: float) -> Row | None:
        """Large stored values, never whole in memory; ``None`` when one of them cannot be read that way."""
        if not (isinstance(self.reference, RunRecording) and isinstance(self.target, RunRecording)):
            return None
        left = self.reference.stream(blank.site, step)
        right = None if left is None else self.target.stream(blank.target_site, step)
        if left is None or right is None or left.shape != right.shape:
            return None
        floor = _default(coarser(left.dtype, right.dtype), before)
        return self._judged(blank, measure_streams(left, right), floor, left.dtype, right.dtype)

    def _judged(
        self, blank: Row, measures: Measures, floor: Floor, reference: torch.dtype, target: torch.dtype
    ) -> Row:
        self.used.update(dict.fromkeys(floor.sources))
        status, excess = status_of(measures, floor)
        return replace(
            blank,
            status=status,
            error=measures.rel_l2,
            floor=floor.l2,
            excess=excess,
            measures=measures,
            note=_note(measures, reference, target),
        )

    def _learnt(self, pair: Pair, left: Tensor, right: Tensor, step: int) -> Floor | None:
        found: list[tuple[str, Measures | None]] = []
        for source, recording in self.harmless:
            try:
                other = recording.tensor(pair.reference, step)
                if other is not None and pair.rule is not None:
                    other = pair.rule.apply("reference", other)
                if other is not None and other.shape == left.shape:
                    found.append((source, measure(left, other)))
            except (TorchtapError, KeyError):
                continue
        return floor_from(found, left.dtype, right.dtype)

    def _by_statistics(self, blank: Row, step: int, before: float) -> Row:
        """Where a whole tensor is missing on one side: the largest relative change of any statistic."""
        error, compared = 0.0, 0
        for name, scale_name in _STATISTICS.items():
            mine = self.reference.statistics(name, step).get(blank.site)
            theirs = self.target.statistics(name, step).get(blank.target_site)
            if mine is None or theirs is None:
                continue
            compared += 1
            if math.isnan(mine) and math.isnan(theirs):
                continue
            scale = abs(self.reference.statistics(scale_name, step).get(blank.site, mine) or mine)
            error = max(error, _relative(abs(theirs - mine), scale))
        if not compared:
            return replace(blank, note="neither whole tensors nor statistics were kept on both sides")
        for name in ("nans", "infs"):
            mine = self.reference.statistics(name, step).get(blank.site, 0.0)
            theirs = self.target.statistics(name, step).get(blank.target_site, 0.0)
            if mine != theirs:
                error = math.inf
        if not math.isinf(error) and self.reference.statistics("nans", step).get(blank.site, 0.0) == (
            self.reference.statistics("count", step).get(blank.site, -1.0)
        ):
            return replace(blank, status="not finite", note="every element is NaN")
        floor = self._learnt_statistics(blank, step) or _default(self._dtype(blank), before)
        self.used.update(dict.fromkeys(floor.sources))
        excess = error / (floor.l2 * floor.margin)
        return replace(
            blank,
            status="diverged" if excess > 1.0 else "within",  # equal statistics do not prove equal values
            error=error,
            floor=floor.l2,
            excess=excess,
            note="statistics only",
        )

    def _dtype(self, row: Row) -> torch.dtype:
        """The coarser of the dtypes that were noted for a site; float32 where nothing was."""
        found = torch.float32
        for noted in (self._dtypes[0].get(row.site), self._dtypes[1].get(row.target_site)):
            dtype = getattr(torch, noted or "", None)
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
                found = coarser(found, dtype) if resolution(dtype) > resolution(torch.float32) else found
        return found

    def _learnt_statistics(self, blank: Row, step: int) -> Floor | None:
        largest, sources = 0.0, []
        for source, recording in self.harmless:
            for name, scale_name in _STATISTICS.items():
                mine = self.reference.statistics(name, step).get(blank.site)
                theirs = recording.statistics(name, step).get(blank.site)
                if mine is None or theirs is None or math.isnan(mine) or math.isnan(theirs):
                    continue
                scale = abs(self.reference.statistics(scale_name, step).get(blank.site, mine) or mine)
                largest = max(largest, _relative(abs(theirs - mine), scale))
                sources.append(source)
        if not sources:
            return None
        least = max(largest, 0.5 * resolution(torch.float32))
        return Floor(least, least, tuple(dict.fromkeys(sources)))

    def basis(self) -> str:
        """What the floors of the last step rest on."""
        return ", ".join(self.used) or "none"

    def first(self, rows: tuple[Row, ...]) -> First | None:
        at = next((n for n, row in enumerate(rows) if row.status == "diverged"), None)
        if at is None:
            return None
        row = rows[at]
        agreed = next((earlier for earlier in reversed(rows[:at]) if earlier.status in COMPARED), None)
        given = _GIVEN.get(row.kind)
        inputs = [r for r in rows if r.module == row.module and r.kind == given and r.status in COMPARED]
        module = _author(row, rows)
        local = row.kind == "input" or (bool(inputs) and all(r.status != "diverged" for r in inputs))
        return First(
            site=row.site,
            module=module,
            index=row.index,
            error=row.error,
            floor=row.floor,
            origin="local" if local else "unknown",
            sure="likely" if row.excess > 4 and (local or agreed is not None) else "possible",
            where=self._where(row),
            evidence="its inputs agree" if local and row.kind != "input" else "",
            after=None if agreed is None else agreed.site,
            contained=_container_that_agrees(row, rows),
        )

    def _where(self, row: Row) -> Profile | None:
        if row.measures is None:
            return None
        pair = next(p for a in self._aligned.values() for p in a.pairs if p.reference == row.site)
        left = self.reference.tensor(row.site, self.current)
        right = self.target.tensor(row.target_site, self.current)
        if left is None or right is None:
            return None
        if pair.rule is not None:
            left, right = pair.rule.apply("reference", left), pair.rule.apply("target", right)
        return locate(left, right)


def _default(dtype: torch.dtype, before: float) -> Floor:
    """The default, raised by the error that was already there before."""
    floor = default_floor(dtype, dtype)
    grown = min(JUMP * before / floor.margin, FAR * floor.l2, max(FARTHEST / floor.margin, floor.l2))
    if grown <= floor.l2:
        return floor
    return replace(floor, l2=grown, linf=floor.linf * grown / floor.l2)


def _relative(difference: float, scale: float) -> float:
    if difference == 0.0:
        return 0.0
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale else math.inf


def _note(measures: Measures, reference: torch.dtype, target: torch.dtype) -> str:
    notes = []
    if measures.masks_differ:
        notes.append(f"NaN or inf in {measures.masks_differ} places of one side alone")
    elif measures.count != measures.compared:
        notes.append(f"{measures.count - measures.compared} places are not finite in both")
    if reference != target:
        notes.append(f"{str(reference).removeprefix('torch.')} and {str(target).removeprefix('torch.')}")
    return "; ".join(notes)


def _container_that_agrees(row: Row, rows: tuple[Row, ...]) -> str | None:
    """The smallest module around a site whose outputs all agree: the difference inside it cancels out or dies."""
    for outer in paths_around(row.module):
        outputs = [r for r in rows if r.module == outer and r.kind == "output" and r.status in COMPARED]
        if outputs and all(r.status != "diverged" for r in outputs):
            return outer
    return None


def _author(row: Row, rows: tuple[Row, ...]) -> str:
    """Whose own code made a value: a module its output, the module around it its input."""
    if row.kind != "input":
        return row.module
    known = {other.module for other in rows}
    return next((outer for outer in paths_around(row.module) if outer in known), "")
