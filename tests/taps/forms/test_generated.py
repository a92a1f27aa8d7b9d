"""A few of the generated models in every form; ``python -m tests.taps.forms.generated 200`` runs more of them."""

from __future__ import annotations

import pytest
from tests.taps.forms.generated import FORMS, judge_seed

# Chosen for their parts: re-used and optional (8), side doors (19), parametrized (16), dropouts and shapes (23).
SEEDS = (8, 16, 19, 23)
# These have every site: the others cannot know all structures.
WHOLE = (
    "eager",
    "compile, eager",
    "script, instrumented",
    "trace, instrumented",
    "FX, instrumented",
    "FX, like",
)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_form_gives_a_wrong_value_under_a_right_name(seed: int) -> None:
    quick = tuple(form for form in FORMS if form not in ("export, strict", "compile, eager", "pickle"))
    judged = 0
    for label, result in judge_seed(seed, quick):
        if isinstance(result, str):
            assert result.startswith("torch:"), (label, result)  # torch cannot make this form
            continue
        judged += 1
        assert result.wrong == [], (label, result.wrong)
        assert result.right, label
        if label in WHOLE:
            assert result.missing == [], (label, result.missing)
    assert judged >= 10
