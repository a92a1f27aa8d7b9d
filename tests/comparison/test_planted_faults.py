"""The comparison names the right module for planted faults, and stays quiet about harmless changes.

A part of the cases; `python -m tests.corpus.planted_modes` runs them all.
"""

from __future__ import annotations

import pytest
from tests.corpus.planted_faults import DEPTHS, Outcome, cases, everywhere, judge, summary
from tests.corpus.planted_modes import port_outcomes, run_mode
from tests.corpus.planted_zoo import ARCHITECTURES

import torchtap


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """A different part of each family's changes; the benchmark runs them all."""
    chosen = [*list(cases())[::9], *list(everywhere())[::13]]
    judged = (judge(case, torchtap.compare) for case in chosen)
    return [outcome for outcome in judged if outcome is not None]


def test_there_are_enough_cases(outcomes: list[Outcome]) -> None:
    every = [*cases(), *everywhere()]
    assert sum(not case.harmless for case in every) >= 150
    assert sum(case.harmless for case in every) >= 80
    assert len(ARCHITECTURES) >= 24
    assert len(outcomes) >= 60
    assert {outcome.case.depth for outcome in outcomes} == set(DEPTHS)


def test_the_first_wrong_module_is_named_without_any_tolerance(outcomes: list[Outcome]) -> None:
    faults = [outcome for outcome in outcomes if not outcome.case.harmless]
    assert sum(outcome.right for outcome in faults) / len(faults) >= 0.97, summary(outcomes)


def test_no_wrong_verdict_is_certain(outcomes: list[Outcome]) -> None:
    assert not [o.case.name for o in outcomes if o.sure == "certain" and not o.right]


def test_harmless_changes_are_the_same(outcomes: list[Outcome]) -> None:
    harmless = [outcome for outcome in outcomes if outcome.case.harmless]
    assert not [o.case.name for o in harmless if not o.right], summary(outcomes)


def test_a_verdict_on_a_single_fault_heals(outcomes: list[Outcome]) -> None:
    faults = [outcome for outcome in outcomes if not outcome.case.harmless]
    assert sum("everything after it agrees" in outcome.verdict for outcome in faults) / len(faults) >= 0.9


def test_recordings_name_the_right_module() -> None:
    found = [o for o in run_mode("recorded inputs and outputs", every=31) if not o.case.harmless]
    assert sum(outcome.right for outcome in found) / len(found) >= 0.95, summary(found)


def test_ports_are_aligned_without_rules() -> None:
    found = port_outcomes(every=4)
    assert sum(outcome.right for outcome in found) / len(found) >= 0.9, summary(found)
