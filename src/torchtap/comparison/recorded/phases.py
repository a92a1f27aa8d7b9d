"""Compare two recordings in every phase: a training may agree while its evaluations differ.

A site is compared in training where it was recorded there (`compare_recordings` of the runs as they are); then each
further phase is compared on its own. Of several phases that differ, the one at the earliest step is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchtap.comparison.align.rules import PairingRule
from torchtap.comparison.judge.result import Comparison, Outcome
from torchtap.comparison.recorded.ahead import Spread
from torchtap.comparison.recorded.comparing import compare_recordings
from torchtap.comparison.recorded.recordings import Recording, RunRecording
from torchtap.errors import CompareError
from torchtap.store.read.lookup import TRAINING

__all__ = ["compare_all_phases"]

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
