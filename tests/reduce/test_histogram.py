"""Histogram: counts against numpy and against the edges it reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reduce.references import flat64
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import Histogram, Reduction, Result
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


class TestHistogramOverARange(ReductionContract):
    rtol = atol = 0.0

    def reduction(self) -> Reduction[Tensor]:
        return Histogram(bins=10, range=(-1, 1))

    def reference(self, values: Sequence[Tensor]) -> Result:
        return counted_by_numpy(values, 10, -1, 1)


class TestHistogramOfAnySize(ReductionContract):
    rtol = atol = 0.0

    def reduction(self) -> Reduction[Tensor]:
        return Histogram()

    def reference(self, values: Sequence[Tensor]) -> Result:
        return counted_by_edges(values, Histogram().edges)


class TestAFineHistogramOfFewOctaves(ReductionContract):
    rtol = atol = 0.0

    def reduction(self) -> Reduction[Tensor]:
        return Histogram(octaves=(-3, 1), per_octave=16)

    def reference(self, values: Sequence[Tensor]) -> Result:
        return counted_by_edges(values, Histogram(octaves=(-3, 1), per_octave=16).edges)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.floats(width=64) | st.integers(-60, 60).map(lambda e: math.copysign(2.0 ** abs(e), e)), max_size=40
    )
)
def test_no_number_is_lost_or_counted_twice(numbers: list[float]) -> None:
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


def test_numbers_on_and_beside_the_edges_agree_with_numpy() -> None:
    reduction = Histogram(bins=10, range=(0, 1))
    edges = reduction.edges
    value = torch.cat(
        [edges, edges.nextafter(torch.tensor(9.0)), edges.nextafter(torch.tensor(-9.0)), edges * 3]
    )
    found = reduction.result(reduction.update(None, value))
    TestHistogramOverARange().check(found, counted_by_numpy([value], 10, 0, 1))


def test_zeros_lie_in_the_middle_bin_whatever_their_sign() -> None:
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
