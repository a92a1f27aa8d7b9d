"""Compare two recordings that were made before: `torchtap compare`, and `torchtap.compare` of anything that is not run.

Imports no torch: where the recordings are runs or folders of plain tensors, none is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, final

from torchtap.comparison.align import Alignment, Unaligned, align
from torchtap.comparison.explain import MOST, differing_term, hidden_only, locate, pattern
from torchtap.comparison.judge import (
    Evidence,
    MissingSite,
    decide,
    doubts,
    gradient_missing,
    judged_without_experiments,
    missing_evidence,
)
from torchtap.comparison.ranks import Ranked, blamed
from torchtap.comparison.recordings import (
    Gap,
    Recording,
    RunRecording,
    Unrecorded,
    gaps_between,
    recording_of,
    some_steps,
)
from torchtap.comparison.result import AGREES, Comparison, FirstDifference, Outcome, Row
from torchtap.comparison.rows import Measuring, changed
from torchtap.comparison.rules import PairingRule
from torchtap.comparison.training import explain_training
from torchtap.comparison.values import Value, signature
from torchtap.comparison.workers import Ahead, Measured, Processes, RayWorkers, Spread, measured_ahead
from torchtap.errors import CompareError, TorchtapError
from torchtap.plan.names import kind_of, parent_path, path_of, read_name
from torchtap.progress import tracked
from torchtap.store.read.lookup import TRAINING

__all__ = [
    "compare_all_phases",
    "compare_recordings",
    "compare_stored",
    "known_harmless",
    "listed",
]


def compare_recordings(
    reference: Recording,
    target: Recording,
    *,
    rules: Sequence[str | PairingRule] = (),
    harmless: Iterable[tuple[str, Recording]] = (),
    only: Sequence[int] | None = None,
    live: bool = False,
    spread: Spread | None = None,
) -> Comparison:
    """Compare step by step, up to the first step at which something differs.

    ``live`` says that both recordings were made just now of whole models: what one of them lacks was not forgotten.
    ``spread`` makes the processes that measure; the result is that of one.
    """
    steps, apart = _common_steps(reference, target, only)
    problems = [*reference.problems(), *target.problems()]
    work = _done((reference, target, tuple(rules), list(harmless)), steps, live, spread)
    apart += work.unrecorded.told()
    if work.first is None and not work.rows:
        raise CompareError(_nothing(reference, target, work, problems))
    several = len(steps) > 1
    rows = tuple(work.rows_with_steps() if several else work.rows)
    also = f", over {len(work.seen)} steps" if several else ""
    further = [*work.doubtful, *(gap.told for gap in apart if not gap.planned)]
    further += [*reference.damage(), *target.damage()]
    outcome, verdict = decide(work.first, rows, work.unaligned, live=live, further=further, also=also)
    if several and work.first is not None:
        verdict = verdict[:-1] + _agreeing(work.seen, work.first) + "."
    return Comparison(
        reference=reference.label,
        target=target.label,
        rows=rows,
        first=work.first,
        verdict=verdict,
        basis=", ".join(work.measuring.used) or "none",
        unaligned=tuple(work.unaligned),
        problems=(*(gap.told for gap in apart), *_without_root(work.rootless), *problems),
        steps=tuple(work.seen),
        outcome=outcome,
        pairing=work.alignment.pairs,
    )


def _is_at_hand(row: Row, module: str) -> bool:
    """Return True if a module's own code has this value: its parameters, what it was given, what a child returned."""
    if row.module == module and row.kind in ("param", "input"):
        return True
    return bool(row.kind == "output" and row.module) and parent_path(row.module) == module


def _agreeing(seen: Sequence[int], first: FirstDifference) -> str:
    """How many steps before the one of the first difference agree."""
    steps = sum(step < first.step for step in seen) if first.step is not None else 0
    return (
        "" if steps < 1 else "; the step before agrees" if steps == 1 else f"; the {steps} steps before agree"
    )


def _without_root(sites: set[str]) -> list[str]:
    if not sites:
        return []
    return [
        f"{', '.join(sorted(sites))}: not compared, since stages of a pipeline have no module around them all"
    ]


def _common_steps(
    reference: Recording, target: Recording, only: Sequence[int] | None
) -> tuple[list[int], list[Gap]]:
    left, right = reference.steps(), target.steps()
    for recording, steps in ((reference, left), (target, right)):
        if not steps:
            damage = recording.problems()
            why = f" ({damage[0]})" if damage else ""
            raise CompareError(f"{recording.label} has no recorded steps; there is nothing to compare{why}")
    common = sorted(set(left) & set(right))
    if only is not None:
        absent = sorted(set(only) - set(common))
        if absent:
            raise CompareError(f"step {absent[0]} is not in both; steps in both: {some_steps(common)}")
        return sorted(only), []
    if not common:
        raise CompareError(
            f"no step is in both: the reference has {some_steps(left)}, the target {some_steps(right)}"
        )
    return common, [*gaps_between(reference, target, left, right)]


def _nothing(reference: Recording, target: Recording, work: _Work, problems: list[str]) -> str:
    if problems:
        return f"no site is in both, and a recording is damaged: {problems[0]}"
    example = next((f" ({u.site}: {u.why})" for u in work.unaligned), "")
    return (
        f"no site of {reference.label} could be paired with one of {target.label}{example}; "
        "are these recordings of the same model? A rule such as 'model.*=*' says which names belong together"
    )


def _done(
    given: tuple[Recording, Recording, tuple[str | PairingRule, ...], list[tuple[str, Recording]]],
    steps: list[int],
    live: bool,
    spread: Spread | None,
) -> _Work:
    """The work of all steps; with workers the rows are measured ahead in processes of their own."""
    work = _Work(*given)
    if spread is not None and len(steps) > 1:
        with measured_ahead(spread(partial(_measuring, *given)), steps) as work.ahead:
            work.run(steps, live)
    else:
        work.run(steps, live)
    return work


def _measuring(*given: Any) -> Callable[[int], Measured]:
    """What measures in a process of its own."""
    return _Work(*given).rows_of


@final
@dataclass(eq=False)
class _Work:
    """One comparison under way. Rows and unpaired sites are those of the step that is shown."""

    reference: Recording
    target: Recording
    rules: tuple[str | PairingRule, ...]
    harmless: list[tuple[str, Recording]]
    rows: list[Row] = field(default_factory=list)
    unaligned: list[Unaligned] = field(default_factory=list)
    alignment: Alignment = field(default_factory=lambda: Alignment((), ()))
    doubtful: list[str] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    current: int = 0
    first: FirstDifference | None = None
    _key: object = None
    _worst: dict[str, Row] = field(default_factory=dict)  # of every site so far, its largest error
    _known: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))
    rootless: set[str] = field(default_factory=set)  # the model's own sites, which a list of stages has not
    ahead: Ahead | None = None  # who measured rows already

    def __post_init__(self) -> None:
        self.measuring = Measuring(self.reference, self.target, self.harmless)
        self.ranked = Ranked(self.measuring)
        self.unrecorded = Unrecorded(self.reference, self.target)

    def run(self, steps: list[int], live: bool) -> None:
        """Go through the steps until one differs."""
        shown: tuple[list[Row], list[Unaligned], int] | None = None
        for step in tracked(steps, "comparing steps"):
            missing = self._step(step)
            before = self.seen[-1] if self.seen else None
            self.seen.append(step)
            self.first = self._verdict(missing, before, several=len(steps) > 1)
            if self.first is not None:
                return
            self._remember(step, several=len(steps) > 1)
            doubted = doubts(self.rows, self.unaligned, live=live)
            if doubted and shown is None:
                shown = (self.rows, self.unaligned, step)
                if len(steps) > 1 and step != steps[-1]:
                    self.doubtful.append(f"at step {step}: {doubted[0]}")
        if shown is not None:
            self.rows, self.unaligned, self.current = shown
        else:  # a step may have recorded little: what agrees is told of all of them together
            self.rows = list(self._worst.values())

    def _remember(self, step: int, several: bool) -> None:
        """Keep the row of each site at the step where its error is largest."""
        for row in self.rows:
            known = self._worst.get(row.site)
            if known is None or row.error > known.error:
                self._worst[row.site] = replace(row, step=step) if several else row

    def _step(self, step: int) -> MissingSite | None:
        self.current = step
        left, right = self.unrecorded.on_both(step, self.reference.sites(step), self.target.sites(step))
        key = (tuple(left), tuple(right))
        if key != self._key:
            self._key = key
            self.alignment = align(left, right, self.rules, signatures=self._signature)
        self.unaligned = list(self.alignment.unaligned)
        self.ranked.begin(left, right)
        self.rows = self._measured(step)
        rootless = [each for each in self.unaligned if self.ranked.has_no_root(each, self.rows)]
        self.rootless.update(each.site for each in rootless)
        self.unaligned = [each for each in self.unaligned if each not in rootless]
        missing = missing_evidence(self.unaligned, left, right, self._known)
        for names, sites in zip(self._known, (left, right), strict=True):
            names.update(site.name for site in sites)
        return missing

    def _measured(self, step: int) -> list[Row]:
        """The rows of a step's pairs."""
        known = None if self.ahead is None else self.ahead(step, self.alignment.pairs)
        if known is not None:
            self.measuring.used.update(dict.fromkeys(known[1]))
            return known[0]
        rows, worst = [], 0.0
        for pair in self.alignment.pairs:
            row = self.ranked.row(pair, step, worst)
            rows.append(row)
            if row.status == "within" and math.isfinite(row.error):
                worst = max(worst, row.error)
        return rows

    def rows_with_steps(self) -> list[Row]:
        """The rows that are shown; what has no step is of the one at which the work ended."""
        return [replace(row, step=self.current) if row.step is None else row for row in self.rows]

    def rows_of(self, step: int) -> Measured:
        """What another process is told of a step."""
        self.measuring.used.clear()
        self._step(step)
        return tuple(self.alignment.pairs), self.rows, tuple(self.measuring.used)

    def _signature(self, on_reference: bool, site: str) -> tuple[float, ...] | None:
        recording = self.reference if on_reference else self.target
        try:
            value = recording.value(site, self.current)
        except (TorchtapError, OSError, RuntimeError, ValueError):
            return None
        return None if value is None else signature(value)

    def _verdict(
        self, missing: MissingSite | None, before: int | None, several: bool
    ) -> FirstDifference | None:
        step = self.current if several else None
        open_inputs = {path_of(each.site) for each in self.unaligned if kind_of(each.site) == "input"}
        first = judged_without_experiments(Evidence(self.rows, missing=missing, open_inputs=open_inputs))[1]
        if first is None:
            return None
        row = next((row for row in self.rows if row.site == first.site), None)
        if row is None:  # a site that one side lacks
            of_parameter = step is not None and kind_of(first.site) == "param_grad"
            return gradient_missing(first, self.current) if of_parameter else replace(first, step=step)
        of_ranks = self._of_ranks(row)
        if of_ranks:
            return replace(first, what=of_ranks, step=step)
        if several:
            told = explain_training(self.reference, self.target, self.rows, row.kind, self.current, before)
            if told is not None:
                return told
        return replace(self._located(first, row), step=step)

    def _of_ranks(self, row: Row) -> str:
        """What ranks of the target did to a value, where that explains the difference."""
        spread = self.ranked.spreads[1]
        if spread is None or self.ranked.spreads[0] is not None or row.status != "diverged":
            return ""
        pair = next(p for p in self.alignment.pairs if p.reference == row.site)
        right = None if pair.rule is not None else self.reference.value(row.site, self.current)
        if right is None:
            return row.note if row.note.startswith("wrong on") else ""
        return blamed(spread, row.target_site, self.current, right)

    def _located(self, first: FirstDifference, row: Row) -> FirstDifference:
        """Where in its value the error sits, and which exact relation it has, if any."""
        if row.measures is None:
            return first
        pair = next(p for p in self.alignment.pairs if p.reference == row.site)
        left = self.reference.value(row.site, self.current)
        right = self.target.value(row.target_site, self.current)
        if left is None or right is None:
            return first
        if pair.rule is not None:
            left, right = changed(pair.rule, "reference", left), changed(pair.rule, "target", right)
        what = pattern(left, right)
        if not what and pair.rule is None and first.origin == "local":
            what = differing_term(left, right, self._terms(first, left))
        return replace(first, where=locate(left, right), what=what or hidden_only(left, right, self._masks()))

    def _terms(self, first: FirstDifference, value: Value) -> Iterator[tuple[str, Value]]:
        """What the module's own code may add up: its recorded parameters, what it was given, what its children
        returned. Its inputs agree, so the reference's stand for both."""
        if prod(value.shape) > MOST:
            return
        for row in self.rows:
            if row.site != first.site and row.status in AGREES and _is_at_hand(row, first.module):
                term = self.reference.value(row.site, self.current)
                if term is not None:
                    yield row.site, term

    def _masks(self) -> Iterator[tuple[str, Value]]:
        for row in self.rows:
            if row.kind == "input" and row.module == "" and row.status in AGREES:
                value = self.reference.value(row.site, self.current)
                if value is not None and value.array.dtype.kind in "biu":
                    yield read_name(row.site).leaf, value


Harmless = Sequence[tuple[str, Recording]]


def compare_all_phases(
    reference: Recording,
    target: Recording,
    *,
    rules: Sequence[str | PairingRule] = (),
    harmless: Harmless = (),
    only: Sequence[int] | None = None,
    live: bool = False,
    spread: Spread | None = None,
) -> Comparison:
    """Compare step by step, phase by phase; the arguments are those of `compare_recordings`."""
    main = compare_recordings(
        reference, target, rules=rules, harmless=harmless, only=only, live=live, spread=spread
    )
    if not (isinstance(reference, RunRecording) and isinstance(target, RunRecording)):
        return main
    further = _further_phases(reference, target)
    told = [main, *(_compare_phase(phase, reference, target, rules, harmless, only) for phase in further)]
    differing = [each for each in told if each.outcome == "differs"]
    if differing:  # a phase at the same step as training is its effect, so the first of equals stays
        return min(differing, key=_step)
    unsure = [each for each in told if each.outcome == "cannot tell"]
    return (
        unsure[0]
        if unsure
        else replace(main, verdict=" ".join(each.verdict for each in told if each.verdict))
    )


def _further_phases(reference: RunRecording, target: RunRecording) -> list[str]:
    phases = list(dict.fromkeys([*reference.run.phases, *target.run.phases]))
    shown = TRAINING if TRAINING in phases else phases[0] if phases else None
    return [phase for phase in phases if phase != shown]


def _compare_phase(
    phase: str,
    reference: RunRecording,
    target: RunRecording,
    rules: Sequence[str | PairingRule],
    harmless: Harmless,
    only: Sequence[int] | None,
) -> Comparison:
    for here, there in ((reference, target), (target, reference)):
        if phase not in there.run.phases:
            return _unknown(phase, reference, target, f"{here.label} recorded it and {there.label} did not")
    left, right = (RunRecording(each.run.of_phase(phase)) for each in (reference, target))
    known = [
        (name, RunRecording(each.run.of_phase(phase)))
        for name, each in harmless
        if isinstance(each, RunRecording) and phase in each.run.phases
    ]
    steps = None if only is None else sorted({*only} & {*left.steps()} & {*right.steps()})
    if steps == []:  # none of the steps that were asked for had this phase
        return _told(reference, target, "", "same")
    try:
        found = compare_recordings(left, right, rules=rules, harmless=known, only=steps)
    except CompareError as error:
        return _unknown(phase, reference, target, str(error))
    return replace(found, verdict=f"In phase {phase}: {found.verdict[0].lower()}{found.verdict[1:]}")


def _unknown(phase: str, reference: RunRecording, target: RunRecording, why: str) -> Comparison:
    verdict = f"Cannot tell: phase {phase} was not compared; {why}."
    return replace(_told(reference, target, verdict, "cannot tell"), problems=(why,))


def _told(reference: RunRecording, target: RunRecording, verdict: str, outcome: Outcome) -> Comparison:
    """The result of a phase of which no site was compared."""
    return Comparison(
        reference=reference.label,
        target=target.label,
        rows=(),
        first=None,
        verdict=verdict,
        basis="none",
        outcome=outcome,
    )


def _step(result: Comparison) -> int:
    return result.first.step if result.first is not None and result.first.step is not None else 0


def compare_stored(
    reference: object,
    target: object,
    *,
    rules: Sequence[str | PairingRule] = (),
    repeat: object = None,
    golden: object = None,
    steps: Sequence[int] | None = None,
    workers: int = 1,
    ray: bool = False,
) -> Comparison:
    """Compare two things that are not to be run; the arguments are those of `torchtap.compare`.

    So many ``workers`` are processes that measure; they are spawned, so a script needs its ``__main__`` guard. With
    ``ray`` they are workers of a Ray cluster.
    """
    left, right = recording_of(reference), recording_of(target)
    harmless = known_harmless(repeat, golden, lambda thing, _: recording_of(thing))
    return compare_all_phases(
        left, right, rules=rules, harmless=harmless, only=steps, spread=_spread(workers, ray)
    )


def _spread(workers: int, ray: bool) -> Spread | None:
    if ray:
        return partial(RayWorkers, workers)
    return partial(Processes, workers) if workers > 1 else None


def listed(things: Any) -> list[Any]:
    """One thing or several, as a list; none for ``None``."""
    if things is None:
        return []
    return list(things) if isinstance(things, (list, tuple)) else [things]


def known_harmless(
    repeat: object, golden: object, take: Callable[[object, str], Recording]
) -> list[tuple[str, Recording]]:
    """The recordings that the user knows to be right."""
    found = [("repeat", take(each, "repeat")) for each in listed(repeat)]
    if golden is not None:
        found.append(("golden", take(golden, "golden")))
    return found
