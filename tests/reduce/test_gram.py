"""Gram: XᵀX against one matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from torchtap.errors import ReductionError
from torchtap.reduce import Gram, Reduction, Result
from torchtap.testing import ReductionContract


class TestGram(ReductionContract):
    def reduction(self) -> Reduction[tuple[Tensor, int]]:
        return Gram()

    def reference(self, values: Sequence[Tensor]) -> Result:
        rows = torch.cat([value.double().reshape(-1, value.shape[-1]) for value in values])
        return {"gram": rows.T @ rows, "rows": float(len(rows))}


class TestGramInSinglePrecision(TestGram):
    rtol, atol = 1e-4, 1e-4

    def reduction(self) -> Reduction[tuple[Tensor, int]]:
        return Gram(dtype="float32")


def test_every_dimension_but_the_last_is_rows() -> None:
    value = torch.randn(2, 3, 5, 4)
    result = Gram().result(Gram().update(None, value))
    rows = value.double().reshape(30, 4)
    torch.testing.assert_close(result["gram"], rows.T @ rows)
    assert result["rows"] == 30.0


def test_a_number_is_one_row_of_one_feature_and_nothing_is_no_rows() -> None:
    assert Gram().result(Gram().update(None, torch.tensor(3.0)))["gram"] == torch.tensor([[9.0]])
    assert Gram().result(Gram().update(None, torch.ones(0, 4)))["rows"] == 0.0
    assert Gram().result(Gram().update(None, torch.ones(4, 0)))["gram"].shape == (0, 0)  # type: ignore[union-attr]


def test_other_numbers_of_features_and_complex_values_are_refused() -> None:
    with pytest.raises(ReductionError, match=r"3 and of 4"):
        Gram().update(Gram().update(None, torch.ones(2, 3)), torch.ones(2, 4))
    with pytest.raises(ReductionError, match="complex"):
        Gram().update(None, torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(ReductionError):
        Gram(dtype="float16")
