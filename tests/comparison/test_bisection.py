"""Bisecting finds the module that comparing finds, with few values in memory, and counts its forwards."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.corpus.planted_faults import dropped_residual, one_weight, swapped_heads
from tests.corpus.planted_models import build
from torch import nn

import torchtap as tt


@pytest.mark.parametrize(
    ("family", "plant", "place", "module"),
    [
        ("GPT", one_weight, "blocks.4.mlp.up", "blocks.4.mlp.up"),
        ("GPT", swapped_heads, "blocks.2.attn", "blocks.2.attn"),
        ("BERT", dropped_residual, "blocks.5", "blocks.5"),
        ("CNN", one_weight, "blocks.0.conv1", "blocks.0.conv1"),
    ],
)
def test_it_finds_the_planted_module(family: str, plant: object, place: str, module: str) -> None:
    reference, inputs = build(family)
    target = copy.deepcopy(reference)
    with torch.no_grad():
        plant(target, place)  # type: ignore[operator]
    found = tt.bisect(reference, target, inputs)
    assert found.first is not None
    assert found.first.module == module
    assert found.first.healed is True
    assert f"{found.forwards} forwards" in found.verdict
    assert found.forwards <= 20
    assert 2 <= len(found.trail) <= 4
    assert found.comparison is not None
    assert len(found.comparison.rows) < 60


def test_it_says_so_when_there_is_nothing_to_find() -> None:
    reference, inputs = build("LSTM")
    found = tt.bisect(reference, copy.deepcopy(reference), inputs)
    assert found.first is None
    assert found.forwards == 3
    assert "No divergence" in str(found)


def test_it_refuses_what_it_cannot_run_module_by_module() -> None:
    reference, inputs = build("CNN")
    with pytest.raises(tt.CompareError, match="eager"):
        tt.bisect(reference, torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), inputs)
