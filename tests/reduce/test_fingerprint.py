"""Fingerprint against whole numbers in plain Python; what statistics cannot see; what is linear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from tests.reduce.references import assert_statistics
from torch import Tensor

from torchtap.reduce import Fingerprint, Reduction, Result, Stats
from torchtap.reduce import elements as module
from torchtap.testing import ReductionContract

WRAP = 1 << 64


def printed(value: Tensor) -> tuple[float, float]:
    keep = Fingerprint()
    found = keep.result(keep.update(None, value))
    return float(found["fingerprint"]), float(found["projection"])


class TestFingerprint(ReductionContract):
    def reduction(self) -> Reduction[object]:
        return Fingerprint()

    def streams(self) -> Iterable[list[Tensor]]:
        torch.manual_seed(0)
        values = torch.randn(6, 5)
        yield [values]
        yield list(values.split([1, 2, 3]))
        yield list(values.to(torch.bfloat16).split(2))
        yield [torch.arange(12).reshape(3, 4)]

    def reference(self, values: Sequence[Tensor]) -> Result:
        keys, weights = (each.tolist() for each in module._keys("cpu"))
        total, projection = 0, 0.0
        for value in values:
            whole = value.reshape(-1).view(module._BITS[value.element_size()]).tolist()
            bits = sum(bit * key for bit, key in zip(whole, keys, strict=False))
            shape = value.dim()
            for size in value.shape:
                shape = shape * module._ORDER + size
            total = total * module._ORDER + bits * module._MIX + shape
            projection += sum(x * w for x, w in zip(value.reshape(-1).tolist(), weights, strict=False))
        signed = (total + WRAP // 2) % WRAP - WRAP // 2
        return {"fingerprint": float(signed >> module._DROPPED), "projection": projection}


def test_elements_that_change_places_leave_every_statistic_and_change_both_numbers() -> None:
    torch.manual_seed(0)
    value = torch.randn(40, 30)
    swapped = value.clone()
    swapped[2, 3], swapped[30, 20] = value[30, 20], value[2, 3]
    stats = Stats()
    assert_statistics(stats.result(stats.update(None, swapped)), [value])  # type: ignore[arg-type]
    assert all(one != other for one, other in zip(printed(value), printed(swapped), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_one_bit_anywhere_is_seen(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    value = (1000 * torch.randn(70_000)).to(dtype)
    plain = printed(value)[0]
    for place in (0, 65_535, 65_536, 69_999):
        bits = value.clone().view(module._BITS[value.element_size()])
        bits[place] ^= 1
        assert printed(bits.view(dtype))[0] != plain


def test_stretches_that_change_places_and_another_shape_are_seen() -> None:
    torch.manual_seed(0)
    value = torch.randn(2, 1 << 16)
    for number in range(2):
        assert printed(value)[number] != printed(value.flip(0))[number]
    assert printed(torch.ones(3, 4))[0] != printed(torch.ones(4, 3))[0]


def test_a_projection_is_linear() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(2, 100_000, dtype=torch.float64)
    assert printed(one / 4 + other)[1] == pytest.approx(printed(one)[1] / 4 + printed(other)[1], rel=1e-9)


def test_values_that_are_not_numbers_have_a_fingerprint_of_their_own() -> None:
    value = torch.tensor([1.0, torch.nan, 3.0])
    assert printed(value)[0] == printed(value.clone())[0]
    assert printed(value)[0] != printed(value.nan_to_num())[0]
    assert printed(torch.zeros(0))[1] == 0
    turned = torch.tensor([1 + 2j, 3 + 4j])
    assert printed(turned)[0] != printed(turned.conj())[0]
