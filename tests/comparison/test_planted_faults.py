"""The comparison names the right module for planted faults, and stays quiet about harmless changes."""

from __future__ import annotations

import pytest
from benchmarks.planted_faults import DEPTHS, Case, Outcome, cases, judge, summary

import torchtap


def a_third_of_the_cases() -> list[Case]:
    """Each change in each family once, at alternating depths; the benchmark runs them all."""
    chosen, depths = {}, list(DEPTHS)
    for case in cases():
        chosen.setdefault((case.family, case.change), []).append(case)
    return [group[n % len(depths)] for n, group in enumerate(chosen.values())]


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [judge(case, torchtap.compare) for case in a_third_of_the_cases()]


def test_there_are_enough_cases(outcomes: list[Outcome]) -> None:
    assert len(outcomes) >= 60
    assert {outcome.case.depth for outcome in outcomes} == set(DEPTHS)


def test_the_first_wrong_module_is_named_without_any_tolerance(outcomes: list[Outcome]) -> None:
    faults = [outcome for outcome in outcomes if not outcome.case.harmless]
    assert sum(outcome.right for outcome in faults) / len(faults) >= 0.95, summary(outcomes)


def test_harmless_changes_raise_no_alarm(outcomes: list[Outcome]) -> None:
    harmless = [outcome for outcome in outcomes if outcome.case.harmless]
    assert sum(not outcome.right for outcome in harmless) / len(harmless) <= 0.02, summary(outcomes)


def test_a_verdict_on_a_single_fault_is_certain_and_heals(outcomes: list[Outcome]) -> None:
    faults = [outcome for outcome in outcomes if not outcome.case.harmless]
    assert sum("everything after it agrees" in outcome.verdict for outcome in faults) / len(faults) >= 0.95
