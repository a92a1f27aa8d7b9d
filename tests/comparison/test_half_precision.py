"""Models in 16 bits: what is undone further on is no fault, what is wrong is; masks are the same in every spelling."""

from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np
import pytest
import torch
from tests.corpus.planted_zoo import build
from torch import Tensor, nn

import torchtap as tt
from torchtap.comparison.measures import measure


def shifted_positions(model: Any, by: int) -> Any:
    """A copy whose rotary embedding counts from another position: only distances matter to attention."""
    changed = copy.deepcopy(model)
    rotary = changed.model.rotary_emb
    plain = rotary.forward
    rotary.forward = types.MethodType(lambda self, x, position_ids: plain(x, position_ids + by), rotary)
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_positions_that_all_moved_alike_are_no_fault_in_any_precision(dtype: torch.dtype) -> None:
    model, inputs = build("llama")
    model = model.to(dtype)
    result = tt.compare(model, shifted_positions(model, 7), inputs=inputs)
    assert result.outcome == "same", result.verdict
    assert "cancel out" in result.verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_base_of_the_rotation_is_a_fault_in_any_precision(dtype: torch.dtype) -> None:
    model, inputs = build("llama")
    model = model.to(dtype)
    changed = copy.deepcopy(model)
    changed.model.rotary_emb.inv_freq *= 0.5
    result = tt.compare(model, changed, inputs=inputs)
    assert result.outcome == "differs"
    assert result.first is not None
    assert result.first.module == "model.rotary_emb"


KEEP = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize("forbidden", [float("-inf"), torch.finfo(torch.float32).min, -10000.0])
@pytest.mark.parametrize("means_look", [True, False])
def test_a_mask_of_booleans_is_the_mask_of_numbers(forbidden: float, means_look: bool) -> None:
    numbers = torch.zeros(2, 3).masked_fill(~KEEP, forbidden)
    booleans = KEEP if means_look else ~KEEP
    assert measure(booleans, numbers).identical
    assert measure(numbers, booleans).identical
    other = booleans.clone()
    other[0, 0] = ~other[0, 0]
    assert not measure(other, numbers).identical


def test_numbers_that_are_no_mask_stay_numbers() -> None:
    assert measure(torch.tensor([True, False]), torch.tensor([1.0, 0.0])).identical
    assert not measure(torch.tensor([True, False]), torch.tensor([0.5, -20000.0])).identical
    assert measure(np.array([1.5, -1e4]), np.array([1.5, -1e4])).identical


@pytest.mark.parametrize("name", ["bert", "llama", "opt"])
def test_another_implementation_of_attention_is_no_fault(name: str) -> None:
    model, inputs = build(name)
    if "attention_mask" not in inputs:
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, 8:] = 0
        inputs = {**inputs, "attention_mask": mask}
    eager: Any = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    assert tt.compare(model, eager, inputs=inputs).outcome == "same"


class Attends(nn.Module):
    """Adds a mask to scores, in the spelling that it was made with."""

    def __init__(self, booleans: bool, wrong: bool = False) -> None:
        super().__init__()
        self.booleans, self.wrong = booleans, wrong
        self.inner = Masked()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(6, 6).tril().bool()
        if self.wrong:
            mask[3, 1] = False
        return self.out(self.inner(x, mask if self.booleans else torch.zeros(6, 6).masked_fill(~mask, -1e9)))


class Masked(nn.Module):
    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        return (scores.masked_fill(~mask, -1e9) if mask.dtype == torch.bool else scores + mask).softmax(-1)


def test_a_mask_in_another_spelling_hides_no_fault_in_it() -> None:
    torch.manual_seed(0)
    reference, same, wrong = Attends(True), Attends(False), Attends(False, wrong=True)
    for other in (same, wrong):
        other.load_state_dict(reference.state_dict())
    x = torch.randn(2, 6, 6)
    assert tt.compare(reference, same, inputs=(x,)).outcome == "same"
    found = tt.compare(reference, wrong, inputs=(x,))
    assert found.first is not None
    assert found.first.module == ""
    assert "mask" in found.first.site


def test_good_quantization_of_one_layer_or_all_is_not_accused_and_a_bad_layer_is_named() -> None:
    model, inputs = build("llama")

    def rounded(linears: list[nn.Linear], levels: int = 127) -> None:
        for linear in linears:
            step = linear.weight.abs().amax(1, keepdim=True) / levels
            linear.weight.data = (linear.weight / step).round() * step

    everywhere, once, bad = (copy.deepcopy(model) for _ in range(3))
    for each in (everywhere, bad):
        rounded([module for module in each.modules() if isinstance(module, nn.Linear)])
    rounded([once.get_submodule("model.layers.1.mlp.up_proj")])
    rounded([bad.get_submodule("model.layers.1.mlp.up_proj")], levels=3)
    for good in (everywhere, once):
        found = tt.compare(model, good, inputs=inputs)
        assert found.outcome == "same"
        assert found.function is not None
        assert found.function.same
        assert found.function.precision == "int8"
    found = tt.compare(model, bad, inputs=inputs)
    assert found.first is not None
    assert found.first.module == "model.layers.1.mlp.up_proj"


def test_nan_is_told_as_nan_and_not_as_an_error_below_its_floor() -> None:
    reference = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    target = copy.deepcopy(reference)
    target[2].weight.data[3] = torch.nan
    verdict = tt.compare(reference, target, inputs=(torch.randn(4, 8),)).verdict
    assert "NaN or infinite in 4 places of one side alone (0 in the reference, 4 in the target)" in verdict
    assert "over a floor" not in verdict
