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
