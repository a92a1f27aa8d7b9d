"""Differences that have a name: factors, transposes, orders, shifts, terms that are missing, hidden positions; and how
much a verdict rests on."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap.comparison.explain import pattern

torch.manual_seed(0)
SQUARE, FLAT = torch.randn(6, 6), torch.randn(4, 6, 10)
PATTERNS: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "2.5 × the reference's": (FLAT, lambda x: 2.5 * x),
    "the reference's with the sign flipped": (FLAT, lambda x: -x),
    "the reference's − 0.3": (FLAT, lambda x: x - 0.3),
    "the reference's transposed": (SQUARE, lambda x: x.t()),
    "transposed, read in the wrong layout": (FLAT, lambda x: x.transpose(1, 2).reshape(x.shape)),
    "with 5 of 6 slices of axis 1 in another order": (FLAT, lambda x: x[:, [3, 0, 2, 1, 5, 4]]),
    "shifted by one along axis 1": (FLAT, lambda x: x.roll(1, 1)),
    "the reference's reversed along axis 2": (FLAT, lambda x: x.flip(2)),
    "slices of axis 0 repeated from others": (FLAT, lambda x: x[[0, 0, 1, 1]]),
    "all zero": (FLAT, torch.zeros_like),
    "with 24 of 240 elements zero": (FLAT, lambda x: x * (torch.arange(10) != 3)),
}


@pytest.mark.parametrize("words", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_exact_relation_has_a_name_in_every_precision(words: str, dtype: torch.dtype) -> None:
    value, change = PATTERNS[words]
    assert words in pattern(value.to(dtype), change(value).to(dtype))


def test_a_difference_without_a_relation_has_no_name() -> None:
    noise = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(1))
    assert pattern(FLAT, FLAT + 0.1 * noise) == ""
    assert pattern(FLAT, FLAT * torch.linspace(1, 1.2, 10)) == ""


class Block(nn.Module):
    """A residual block whose code can be wrong in the ways that ports are."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.norm, self.lift = nn.LayerNorm(8), nn.Linear(8, 8)
        self.offset = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        y = self.lift(self.norm(x))
        if self.fault == "no residual":
            return y + self.offset
        if self.fault == "no offset":
            return x + y
        if self.fault == "residual twice":
            return x + x + y + self.offset
        if self.fault == "half the branch":
            return x + 0.5 * y + self.offset
        out = x + y + self.offset
        if self.fault == "padding" and attention_mask is not None:
            out = torch.where(attention_mask[..., None].bool(), out, out.cos())
        return out


class Model(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.first, self.second, self.head = Block(""), Block(fault), nn.Linear(8, 3)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.second(self.first(x, attention_mask), attention_mask))


TERMS = {
    "no residual": "the reference's without `second:input.x`",
    "no offset": "the reference's without `second.offset`",
    "residual twice": "the reference's with `second:input.x` added once more",
    "half the branch": "the reference's − 0.5 × `second.lift:output`",
}


def models(fault: str) -> tuple[Model, Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    reference, target = Model(), Model(fault)
    target.load_state_dict(reference.state_dict())
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[1, 3:] = 0
    return reference, target, {"x": torch.randn(2, 5, 8), "attention_mask": mask}


def test_a_difference_at_padding_alone_is_mentioned_and_harmless() -> None:
    reference, target, inputs = models("padding")
    result = tt.compare(reference, target, inputs=inputs)
    assert result.outcome == "same"
    assert "at those that a mask hides, second:output differs" in result.verdict


@pytest.mark.parametrize("fault", TERMS)
def test_a_term_that_is_missing_is_named(fault: str) -> None:
    reference, target, inputs = models(fault)
    result = tt.compare(reference, target, inputs=inputs)
    assert result.first is not None
    assert result.first.module == "second"
    assert TERMS[fault] in result.verdict


@pytest.mark.parametrize("fault", TERMS)
def test_a_term_that_is_missing_is_named_from_recordings(fault: str) -> None:
    reference, target, inputs = models(fault)
    kept: list[dict[str, Any]] = []
    for model in (reference, target):
        with torch.no_grad(), tt.capture(model, "*:input", "*:output", "*:param") as seen:
            model(**inputs)
        kept.append({name: seen[name] for name in seen})
    result = tt.compare(kept[0], kept[1])
    assert result.first is not None
    assert result.first.module == "second"
    words = TERMS[fault].replace("second.offset", "second:param.offset")
    assert words in result.verdict


def test_confidence_is_what_the_outcome_rests_on(tmp_path: Path) -> None:
    reference, target, inputs = models("no residual")
    proven = tt.compare(reference, target, inputs=inputs)
    assert (proven.first and proven.first.sure, proven.confidence) == ("certain", "high")
    assert tt.compare(reference, copy.deepcopy(reference), inputs=inputs).confidence == "high"
    for name, model in (("a", reference), ("b", target)):
        for kind, keep in (("values", tt.Full()), ("numbers", tt.Stats())):
            taps = [tt.tap("*:output", keep=keep)]
            with tt.watch(model, tmp_path / f"{name}-{kind}", taps) as watch, torch.no_grad(), watch.step():
                model(**inputs)
    assert tt.compare(tmp_path / "a-values", tmp_path / "b-values").confidence == "medium"
    by_numbers = tt.compare(tmp_path / "a-numbers", tmp_path / "b-numbers")
    assert by_numbers.outcome == "differs"
    assert by_numbers.confidence == "low"
    assert json.loads(by_numbers.to_json())["confidence"] == "low"
    assert tt.compare(tmp_path / "a-numbers", tmp_path / "a-numbers").confidence == "low"
    assert tt.compare(tmp_path / "a-values", tmp_path / "a-values").confidence == "high"
    shorter = {"x": torch.ones(3), "y": torch.ones(2)}
    assert tt.compare(shorter, {"x": torch.ones(3)}).confidence == "none"
