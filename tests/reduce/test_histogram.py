"""Histogram: counts against numpy and against the edges it reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reduce.references import flat64
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import Histogram, Reduction, Result, kernel
from torchtap.testing import ReductionContract


def counted_by_numpy(values: Sequence[Tensor], bins: int, low: float, high: float) -> Result:
    x = flat64(values)
    finite = x[x.isfinite()].numpy()
    counts, edges = np.histogram(
        finite, bins=torch.linspace(low, high, bins + 1, dtype=torch.float64).numpy()
    )
    return {
        "counts": torch.from_numpy(counts),
        "edges": torch.from_numpy(edges),
        "underflow": float((finite < low).sum()),
        "overflow": float((finite > high).sum()),
        "nans": float(x.isnan().sum()),
        "infs": float(x.isinf().sum()),
    }


def counted_by_edges(values: Sequence[Tensor], edges: Tensor) -> Result:
    """Bins closed at their end nearer to zero: searched by magnitude, then mirrored."""
    x = flat64(values)
    finite = x[x.isfinite()]
    side = len(edges) // 2
    step = torch.bucketize(finite.abs(), edges[side:], right=True)  # 0 is the middle, `side` is beyond
    place = torch.where(finite < 0, -step, step) + side
    counts = torch.bincount(place, minlength=2 * side + 1)
    return {
        "counts": counts[1:-1],
        "edges": edges,
        "underflow": float(counts[0]),
        "overflow": float(counts[-1]),
        "nans": float(x.isnan().sum()),
        "infs": float(x.isinf().sum()),
    }


@pytest.mark.usefixtures("path")
class TestHistogramOverARange(ReductionContract):
    rtol = atol = 0.0

    def reduction(self) -> Reduction[Tensor]:
        return Histogram(bins=10, range=(-1, 1))

    def reference(self, values: Sequence[Tensor]) -> Result:
        return counted_by_numpy(values, 10, -1, 1)


@pytest.mark.usefixtures("path")
class TestHistogramOfAnySize(ReductionContract):
    rtol = atol = 0.0

    def reduction(self) -> Reduction[Tensor]:
        return Histogram()

    def reference(self, values: Sequence[Tensor]) -> Result:
        return counted_by_edges(values, Histogram().edges)


@pytest.mark.usefixtures("path")
class TestAFineHistogramOfFewOctaves(ReductionContract):
    rtol = atol = 0.0

    def reduction(self) -> Reduction[Tensor]:
        return Histogram(octaves=(-3, 1), per_octave=16)

    def reference(self, values: Sequence[Tensor]) -> Result:
        return counted_by_edges(values, Histogram(octaves=(-3, 1), per_octave=16).edges)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.floats(width=64) | st.integers(-60, 60).map(lambda e: math.copysign(2.0 ** abs(e), e)), max_size=40
    )
)
def test_no_number_is_lost_or_counted_twice(path: str, numbers: list[float]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        value = torch.tensor(numbers, dtype=torch.float64).to(dtype)
        for reduction in (Histogram(), Histogram(bins=7, range=(-3, 11))):
            result = reduction.result(reduction.update(None, value))
            counts = result["counts"]
            assert isinstance(counts, Tensor)
            outside = sum(float(result[name]) for name in ("underflow", "overflow", "nans", "infs"))
            assert int(counts.sum()) + outside == len(numbers)
        wanted = counted_by_edges([value], Histogram().edges)["counts"]
        found = Histogram().result(Histogram().update(None, value))["counts"]
        assert isinstance(found, Tensor)
        assert isinstance(wanted, Tensor)
        assert torch.equal(found, wanted)


def test_numbers_on_and_beside_the_edges_agree_with_numpy(path: str) -> None:
    reduction = Histogram(bins=10, range=(0, 1))
    edges = reduction.edges
    value = torch.cat(
        [edges, edges.nextafter(torch.tensor(9.0)), edges.nextafter(torch.tensor(-9.0)), edges * 3]
    )
    found = reduction.result(reduction.update(None, value))
    TestHistogramOverARange().check(found, counted_by_numpy([value], 10, 0, 1))


def test_zeros_lie_in_the_middle_bin_whatever_their_sign(path: str) -> None:
    counts = Histogram().result(Histogram().update(None, torch.tensor([0.0, -0.0, 1e-30, -1e-30])))["counts"]
    assert isinstance(counts, Tensor)
    assert counts[len(counts) // 2] == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"bins": 64},
        {"bins": 0, "range": (0, 1)},
        {"range": (1, 0)},
        {"range": (0, math.inf)},
        {"octaves": (3, 3)},
        {"octaves": (-200, 3)},
        {"per_octave": 3},
    ],
)
def test_bins_that_cannot_be_are_refused_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(ReductionError):
        Histogram(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", sorted(kernel.DTYPE_CODES, key=str))
def test_every_dtype_is_counted_as_its_numbers(path: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    value = (torch.randn(3, 5003) * 40).to(dtype)[:, ::2]
    for reduction in (Histogram(), Histogram(bins=9, range=(-31, 50))):
        found = reduction.result(reduction.update(None, value))
        wanted = (
            counted_by_edges([value], reduction.edges)
            if reduction.range is None
            else counted_by_numpy([value], 9, -31, 50)
        )
        TestHistogramOfAnySize().check(found, wanted)


def test_numbers_beyond_the_grid_are_counted_by_their_side(path: str) -> None:
    reduction = Histogram(octaves=(-2, 2))
    value = torch.tensor([4.0, -4.0, 3.99, -1e300, 1e300, 5.0], dtype=torch.float64)
    result = reduction.result(reduction.update(None, value))
    assert (result["underflow"], result["overflow"]) == (2.0, 3.0)
