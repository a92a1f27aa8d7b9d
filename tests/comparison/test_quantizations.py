"""Good quantizations are the same function; bad ones differ, by their layer or as a whole.

The cases of the small model, and one of another layout; ``python -m tests.corpus.quantizations`` runs them all.
"""

from __future__ import annotations

import pytest
from tests.corpus.quantizations import CASES, QuantizationCase, judged

import torchtap

SAMPLE = [case for case in CASES if case.model == "mlp" or case.name == "gpt: int8 rows"]


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_a_quantization_is_judged_by_what_it_does_to_the_function(case: QuantizationCase) -> None:
    right, shown = judged(case, torchtap.compare)
    assert right, shown
