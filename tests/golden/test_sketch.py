"""Sketches give the distance of tensors that nobody kept; held against plain torch."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from torchtap.golden.sketch import sketch

VALUES = {
    "matrix": torch.randn(37, 53, generator=torch.Generator().manual_seed(0)),
    "vector": torch.randn(5, generator=torch.Generator().manual_seed(0)),
    "scalar": torch.tensor(2.5),
    "picture": torch.randn(2, 3, 17, 19, generator=torch.Generator().manual_seed(0)),
}


def one_element(value: Tensor) -> Tensor:
    changed = value.clone()
    changed.view(-1)[-1] += 0.1
    return changed


CHANGES = {
    "one element": one_element,
    "scaled": lambda value: value * 1.01,
    "shifted": lambda value: value + 0.01,
    "noise": lambda value: (
        value + 0.01 * torch.randn(value.shape, generator=torch.Generator().manual_seed(5))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", VALUES)
def test_the_distance_of_sketches_is_near_the_relative_distance_of_the_tensors(
    name: str, change: str
) -> None:
    value = VALUES[name]
    other = CHANGES[change](value)
    true = float((other - value).double().norm() / value.double().norm())
    assert true / 3 < sketch(value).distance(sketch(other)) < 3 * true


def test_the_sketch_of_an_update_is_the_difference_of_the_sketches() -> None:
    before, after = VALUES["matrix"].double(), VALUES["matrix"].double() * 1.5 - 0.3
    made, direct = sketch(after).minus(sketch(before)), sketch(after - before)
    assert made.distance(direct) < 1e-12
    assert made.norm == pytest.approx(float((after - before).norm()), rel=0.5)


def test_signs_are_the_same_on_every_machine() -> None:
    row = sketch(torch.arange(12.0)).row
    assert hashlib.sha256(row.tobytes()).hexdigest()[:12] == "171cae399f60"


def test_infinities_and_nans_count_by_their_places() -> None:
    value = torch.ones(4, 4)
    left, right = value.clone(), value.clone()
    left[0, 1], right[1, 0] = float("-inf"), float("-inf")
    assert sketch(left).distance(sketch(left.clone())) == 0.0
    assert sketch(left).distance(sketch(right)) > 0.1
    assert sketch(value).distance(sketch(left)) == float("inf")
    left[2, 2] = float("nan")
    assert (sketch(left).infinite, sketch(left).nans) == (2, 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.complex64])
def test_every_dtype_has_a_sketch(dtype: torch.dtype) -> None:
    value = (torch.arange(30).view(5, 6) % 2).to(dtype)
    assert sketch(value).distance(sketch(value.clone())) == 0.0
    assert sketch(value).distance(sketch(1 - value if dtype != torch.bool else ~value)) > 0.5


def test_an_empty_tensor_has_a_sketch() -> None:
    assert sketch(torch.zeros(0, 3)).distance(sketch(torch.zeros(0, 3))) == 0.0


def test_a_nested_tensor_has_a_sketch() -> None:
    nested = torch.nested.nested_tensor([VALUES["vector"], VALUES["vector"][:3]])
    assert sketch(nested).distance(sketch(nested.clone())) == 0.0
