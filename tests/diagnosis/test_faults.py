"""A fast part of the bench of faults: each is named, at the right site, and its twin is not."""

from __future__ import annotations

import pytest
from tests.corpus.diagnosis.bench import FAULTS, UNLISTED, tried, warned
from tests.corpus.diagnosis.controls import CONTROLS
from tests.corpus.diagnosis.kit import Case
from tests.corpus.diagnosis.odd_loops import ODD_LOOPS
from tests.corpus.diagnosis.odd_models import ODD_MODELS

QUICK = (
    "A1",
    "A2",
    "A3",
    "A4",
    "A7",
    "A9",
    "A15",
    "B1",
    "B2",
    "B3",
    "B9",
    "B11",
    "C1",
    "C4",
    "C6",
    "C9",
    "C12",
    "C13",
    "D2",
    "D4",
)
SOME_CONTROLS = (
    "lora",
    "gan",
    "accumulation",
    "warm_up",
    "scaler",
    "frozen_norm",
    "actor_critic",
    "vae",
    "lbfgs",
    "large_batch",
    "sparse_embedding",
    "gradual_unfreezing",
    "proximal_policy",
    "wasserstein_gan",
    "skipping_scaler",
    "experts",
    "head_only",
    "plain_stack",
)


@pytest.mark.parametrize(
    "case", [case for case in FAULTS if case.number in QUICK], ids=lambda case: case.number
)
def test_a_fault_is_named_at_the_right_site_and_its_twin_is_healthy(case: Case) -> None:
    outcome = tried(case, seed=0)
    assert outcome.good, outcome.said
    assert outcome.twin_warnings == ()


@pytest.mark.parametrize("case", UNLISTED, ids=lambda case: case.number)
def test_a_fault_that_is_on_no_list_is_named_too(case: Case) -> None:
    outcome = tried(case, seed=0)
    assert outcome.good, outcome.said
    assert outcome.twin_warnings == ()


@pytest.mark.parametrize("number", ["A2", "B1", "C6"])
def test_a_fault_is_named_in_a_compiled_model(number: str) -> None:
    (case,) = [case for case in FAULTS if case.number == number]
    outcome = tried(case, seed=1, compiled=True)
    assert outcome.good, outcome.said


@pytest.mark.parametrize("name", SOME_CONTROLS)
def test_an_odd_but_healthy_training_has_no_warning(name: str) -> None:
    works = [each for each in (*CONTROLS, *ODD_LOOPS, *ODD_MODELS) if each[0] == name]
    assert works
    assert warned(works, seed=1) == []
