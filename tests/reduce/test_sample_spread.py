"""SampleSpread against a plain formula over all samples at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtap.reduce import Reduction, Result, SampleSpread
from torchtap.testing import ReductionContract


class TestSampleSpread(ReductionContract):
    def reduction(self) -> Reduction[Tensor]:
        return SampleSpread()

    def reference(self, values: Sequence[Tensor]) -> Result:
        whole = torch.cat([torch.nan_to_num(value.double(), 0.0, 0.0, 0.0) for value in values])
        if len(whole) < 4:
            return {"between": float("nan")}
        return {"between": float(whole.var(0, correction=0).mean() / whole.square().mean())}


def test_one_answer_for_every_sample_has_no_spread_however_its_values_differ() -> None:
    row = torch.randn(1, 50)
    keep = SampleSpread()
    assert float(keep.result(keep.update(None, row.expand(16, -1)))["between"]) == 0
    assert float(keep.result(keep.update(None, torch.randn(16, 50)))["between"]) > 0.5


def test_large_values_are_looked_at_in_part() -> None:
    keep = SampleSpread(features=10)
    assert keep.update(None, torch.randn(8, 3, 1000)).shape[1] <= 10


def test_sequences_of_different_lengths_join() -> None:
    keep = SampleSpread()
    state = keep.update(keep.update(None, torch.randn(4, 9)), torch.randn(4, 6))
    assert state.shape[1] == 6


def test_a_single_number_says_nothing_of_samples() -> None:
    keep = SampleSpread()
    assert torch.isnan(torch.as_tensor(keep.result(keep.update(None, torch.tensor(1.0)))["between"]))
