"""TopK: against a full stable sort."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reduce.references import flat64
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import Reduction, Result, TopK
from torchtap.testing import ReductionContract

KEYS = {"abs": torch.abs, "largest": torch.positive, "smallest": torch.neg}


def by_sorting(values: Sequence[Tensor], k: int, by: str) -> Result:
    x = flat64(values)
    places = (~x.isnan()).nonzero().reshape(-1)
    order = KEYS[by](x[places]).sort(descending=True, stable=True).indices[:k]
    return {"values": x[places[order]], "indices": places[order]}


class TestTopKByMagnitude(ReductionContract):
    rtol = atol = 0.0

    def reduction(self) -> Reduction[object]:
        return TopK(k=7)  # type: ignore[return-value]

    def reference(self, values: Sequence[Tensor]) -> Result:
        return by_sorting(values, 7, "abs")


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-3, 3).map(float) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=24),
    st.integers(0, 24),
    st.sampled_from(sorted(KEYS)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_of_equals_the_first_counts_whatever_the_split(
    numbers: list[float], cut: int, by: str, dtype: torch.dtype
) -> None:
    whole = torch.tensor(numbers, dtype=dtype)
    reduction = TopK(k=5, by=by)
    merged = reduction.merge(reduction.update(None, whole[:cut]), reduction.update(None, whole[cut:]))
    TestTopKByMagnitude().check(reduction.result(merged), by_sorting([whole], 5, by))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_whole_numbers_keep_their_extremes(dtype: torch.dtype) -> None:
    value = torch.tensor([0, 1, 100, -128, 100]).to(dtype)
    for by in KEYS:
        reduction = TopK(k=2, by=by)
        found = reduction.result(reduction.update(None, value))
        TestTopKByMagnitude().check(found, by_sorting([value], 2, by))


def test_an_order_that_is_not_known_is_refused() -> None:
    with pytest.raises(ReductionError, match="abs"):
        TopK(by="biggest")
    with pytest.raises(ReductionError):
        TopK(k=0)
