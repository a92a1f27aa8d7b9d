"""Units against a loop over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import Reduction, Result, Units
from torchtap.testing import ReductionContract


class TestUnits(ReductionContract):
    def reduction(self) -> Reduction[Tensor]:
        return Units()

    def streams(self) -> Iterable[list[Tensor]]:
        torch.manual_seed(0)
        values = torch.randn(6, 5, 8).relu()
        values[..., :4] = 0
        yield [values]
        yield list(values.split([1, 2, 3]))
        yield list(values.to(torch.bfloat16).split(2))
        yield [torch.randn(2, 3, 4, 4).relu() * torch.tensor([0.0, 1, 1]).view(3, 1, 1)]

    def reference(self, values: Sequence[Tensor]) -> Result:
        dim = 1 if values[0].dim() >= 4 else values[0].dim() - 1
        units = range(values[0].shape[dim])
        fired = torch.tensor([any(bool((v.select(dim, unit) != 0).any()) for v in values) for unit in units])
        dead = float((~fired).sum())
        return {"units": float(len(fired)), "dead": dead, "dead_share": dead / len(fired), "fired": fired}


def test_half_of_the_units_dead_is_told_from_units_that_are_zero_half_of_the_time() -> None:
    half = torch.rand(64, 8) + 0.1
    half[:, :4] = 0
    sparse = torch.rand(64, 8) + 0.1
    sparse[::2] = 0
    assert (half == 0).float().mean() == (sparse == 0).float().mean() == 0.5
    assert float(Units().result(Units().update(None, half))["dead_share"]) == 0.5
    assert float(Units().result(Units().update(None, sparse))["dead_share"]) == 0


def test_a_single_row_is_one_value_for_each_unit() -> None:
    assert Units().result(Units().update(None, torch.tensor([0.0, 1, 0])))["dead"] == 2


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ReductionError, match="at least one dimension"):
        Units().update(None, torch.tensor(1.0))
    with pytest.raises(ReductionError, match=r"dim=3\) does not fit a value of shape \(2, 2\)"):
        Units(dim=3).update(None, torch.zeros(2, 2))
    with pytest.raises(ReductionError, match="8 and 4 units"):
        Units().merge(torch.zeros(8, dtype=torch.bool), torch.zeros(4, dtype=torch.bool))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_wide_units_are_counted_to_their_last_value(dim: int) -> None:
    """A few values of each are looked at first: what fires only at its end fires as well."""
    torch.manual_seed(0)
    value = torch.randn(40, 200).movedim(0, dim)
    units = value.movedim(dim, 0)
    units[3] = 0
    units[7, :-1] = 0
    units[11, :16] = 0
    units[12:20] = 0
    found = Units(dim=dim).result(Units(dim=dim).update(None, value))
    assert found["dead"] == 9
    assert found["fired"].logical_not().nonzero()[:, 0].tolist() == [3, *range(12, 20)]
