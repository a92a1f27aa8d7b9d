"""Quantiles: within the promised accuracy of the sorted values, whatever the split."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reduce.references import flat64
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import Quantiles, Reduction, Result
from torchtap.testing import ReductionContract

SHARES = (0.0, 0.1, 0.5, 0.9, 0.999, 1.0)


def by_sorting(values: Sequence[Tensor]) -> Result:
    x = flat64(values)
    ordered = x[x.isfinite()].sort().values
    return {
        f"p{100 * share:g}": float(ordered[math.floor(share * (len(ordered) - 1))])
        if len(ordered)
        else math.nan
        for share in SHARES
    }


@pytest.mark.usefixtures("path")
class TestQuantiles(ReductionContract):
    rtol = 0.01

    def reduction(self) -> Reduction[tuple[Tensor, Tensor]]:
        return Quantiles(at=SHARES)

    def reference(self, values: Sequence[Tensor]) -> Result:
        return by_sorting(values)


class TestFineQuantiles(TestQuantiles):
    rtol = 0.001

    def reduction(self) -> Reduction[tuple[Tensor, Tensor]]:
        return Quantiles(at=SHARES, accuracy=0.001)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(width=32), min_size=1, max_size=30), st.integers(0, 30))
def test_any_numbers_and_any_split_give_the_same_accurate_answer(
    path: str, numbers: list[float], cut: int
) -> None:
    whole = torch.tensor(numbers)
    reduction = Quantiles(at=SHARES)
    left = reduction.update(None, whole[:cut])
    right = reduction.update(None, whole[cut:])
    found = reduction.result(reduction.merge(left, right))
    alone = reduction.result(reduction.update(None, whole))
    for name, wanted in by_sorting([whole]).items():
        one = float(found[name])
        assert one == float(alone[name]) or (math.isnan(one) and math.isnan(float(alone[name])))
        if math.isnan(float(wanted)):
            assert math.isnan(one)
        elif 2.0**-64 <= abs(float(wanted)) < 2.0**64:
            assert one == pytest.approx(float(wanted), rel=0.01)


def test_the_ends_are_exact_and_nothing_gives_nan() -> None:
    reduction = Quantiles(at=(0, 1))
    value = torch.tensor([1e30, -2e-30, 3.3, math.nan, math.inf], dtype=torch.float64)
    assert reduction.result(reduction.update(None, value)) == {"p0": -2e-30, "p100": 1e30}
    assert all(math.isnan(float(x)) for x in reduction.result(reduction.update(None, torch.ones(0))).values())


def test_what_cannot_be_promised_is_refused() -> None:
    for wrong in ({"at": (1.5,)}, {"at": ()}, {"accuracy": 1e-9}, {"accuracy": 0.7}):
        with pytest.raises(ReductionError):
            Quantiles(**wrong)  # type: ignore[arg-type]
