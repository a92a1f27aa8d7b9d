"""Sample: the same positions for the same size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import Reduction, Result, Sample
from torchtap.testing import ReductionContract


def positions_of(count: int, n: int, seed: int) -> Tensor:
    reduction = Sample(n=n, seed=seed)
    found = reduction.result(reduction.update(None, torch.arange(count)))["values"]
    assert isinstance(found, Tensor)
    return found


class TestSample(ReductionContract):
    rtol = atol = 0.0

    def reduction(self) -> Reduction[tuple[list[Tensor], list[Tensor]]]:
        return Sample(n=5, seed=3)

    def reference(self, values: Sequence[Tensor]) -> Result:
        places = [positions_of(value.numel(), 5, 3) for value in values]
        taken = [value.reshape(-1)[place] for value, place in zip(values, places, strict=True)]
        return {"values": torch.cat(taken), "positions": torch.cat(places)}


def test_positions_are_distinct_and_follow_the_seed() -> None:
    first = positions_of(10_000, 100, 0)
    assert len(first.unique()) == 100
    assert torch.equal(first, positions_of(10_000, 100, 0))
    assert not torch.equal(first, positions_of(10_000, 100, 1))


def test_a_reshaped_value_is_sampled_at_the_same_elements() -> None:
    reduction = Sample(n=7)
    base = torch.randn(6, 8)
    flat = reduction.result(reduction.update(None, base.reshape(-1)))
    turned = reduction.result(reduction.update(None, base.t().contiguous().t()))
    assert torch.equal(flat["values"], turned["values"])  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (3,)])
def test_fewer_elements_than_asked_for_are_all_kept(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    reduction = Sample(n=5)
    found = reduction.result(reduction.update(None, value))
    assert torch.equal(found["values"], value.reshape(-1))  # type: ignore[arg-type]


def test_asking_for_nothing_is_refused() -> None:
    with pytest.raises(ReductionError):
        Sample(n=0)
    with pytest.raises(ReductionError):
        Sample(seed=-1)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint16,
        torch.uint64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    ],
)
def test_elements_of_every_dtype_are_picked_as_they_are(dtype: torch.dtype) -> None:
    value = torch.arange(40).reshape(5, 8).to(dtype).t()  # not in one piece
    sample = Sample(7)
    result = sample.result(sample.update(sample.update(None, value), value))
    assert result["values"].dtype == dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = value.to(wide).flatten()[result["positions"]]
    torch.testing.assert_close(result["values"].to(wide), expected, rtol=0, atol=0)


def test_values_of_several_dtypes_are_joined_in_the_one_that_holds_them() -> None:
    sample = Sample(3)
    result = sample.result(sample.update(sample.update(None, torch.ones(3)), torch.full((3,), 2.0).double()))
    assert result["values"].tolist() == [1, 1, 1, 2, 2, 2]
    assert result["values"].dtype == torch.float64
