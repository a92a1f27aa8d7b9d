"""Faults of ranks: each is named with its site, its first step and the rank; healthy trainings are left alone."""

from __future__ import annotations

import pytest
from tests.corpus.diagnosis.rank_controls import RANK_CONTROLS
from tests.corpus.diagnosis.rank_faults import (
    RANK_CASES,
    RankCase,
    RankOutcome,
    tried_on_ranks,
    warned_on_ranks,
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, RankOutcome]:
    """All of them, by a few groups of processes."""
    return {each.case.number: each for each in tried_on_ranks(RANK_CASES, [0])}


@pytest.fixture(scope="module")
def said() -> list[str]:
    return warned_on_ranks(list(RANK_CONTROLS), [0])


@pytest.mark.parametrize("case", RANK_CASES, ids=lambda case: case.number)
def test_a_fault_of_ranks_is_named_and_its_twin_is_healthy(
    outcomes: dict[str, RankOutcome], case: RankCase
) -> None:
    outcome = outcomes[case.number]
    assert case.named(outcome.found), [(each.kind, each.site, each.step, str(each)) for each in outcome.found]
    assert outcome.twin == ()
    assert [each for each in outcome.found.unjudged if "raised" in each.reason] == []


@pytest.mark.parametrize("name", RANK_CONTROLS)
def test_nothing_is_said_of_a_healthy_training(said: list[str], name: str) -> None:
    assert [text for text in said if text.startswith(name)] == []
