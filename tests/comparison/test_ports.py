"""Ports with other names, signatures and layouts: the wrong module is named without rules, healthy ports are the same.

A part of the cases; ``python -m tests.corpus.ports`` runs them all.
"""

from __future__ import annotations

import pytest
from tests.corpus.ports import FAMILIES, cases_of, run_case

import torchtap


@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_port_is_the_same_and_a_wrong_attention_is_named(family: str) -> None:
    healthy = next(case for case in cases_of(family) if case.harmless)
    wrong = next(case for case in cases_of(family) if case.change == "scale")
    for case in (healthy, wrong):
        found = run_case(case, torchtap.compare)
        assert found.right, found.verdict
