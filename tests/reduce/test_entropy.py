"""Entropy against its definition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchtap as tt
from torchtap.errors import ReductionError
from torchtap.reduce import Entropy, Reduction, Result
from torchtap.testing import ReductionContract


class TestEntropy(ReductionContract):
    rtol, atol = 1e-5, 1e-6

    def reduction(self) -> Reduction[tuple[Tensor, int]]:
        return Entropy()

    def streams(self) -> Iterable[list[Tensor]]:
        torch.manual_seed(0)
        maps = torch.softmax(torch.randn(6, 3, 4, 5, dtype=torch.float64), -1)
        yield [maps.float()]
        yield list(maps.float().split([1, 2, 3]))
        yield list(maps.to(torch.bfloat16).split(2))
        yield [maps.transpose(0, 2), maps.transpose(0, 2)]
        yield [torch.eye(5).expand(2, 3, 5, 5)]

    def reference(self, values: Sequence[Tensor]) -> Result:
        values = [v.unsqueeze(1) if v.dim() == 2 else v for v in values]
        rows = torch.cat([v.double().movedim(1, 0).reshape(v.shape[1], -1, v.shape[-1]) for v in values], 1)
        each = torch.special.entr(rows).sum(-1).mean(1)
        return {"entropy": each.mean(), **{f"head_{i}": value for i, value in enumerate(each)}}


def test_a_uniform_distribution_has_the_entropy_of_its_size() -> None:
    uniform = torch.full((2, 4, 3, 8), 1 / 8)
    result = Entropy().result(Entropy().update(None, uniform))
    assert float(result["head_3"]) == pytest.approx(math.log(8))


def test_heads_that_come_in_pieces_are_told_apart() -> None:
    maps = torch.softmax(torch.randn(2, 6, 3, 8), -1)
    whole = Entropy().result(Entropy().update(None, maps))
    pieces = Entropy().result(Entropy().update_pieces(None, maps.split(2, dim=1)))
    assert whole == pieces


def test_values_with_other_heads_or_no_distribution_are_refused() -> None:
    state = Entropy().update(None, torch.ones(1, 2, 3))
    with pytest.raises(ReductionError, match="2 and 3 heads"):
        Entropy().update(state, torch.ones(1, 3, 3))
    with pytest.raises(ReductionError, match="shape"):
        Entropy().update(None, torch.ones(3))


def test_it_keeps_the_entropy_of_a_models_attention() -> None:
    class Fused(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    model, q = Fused(), torch.randn(2, 4, 6, 8)
    with tt.capture(model, tt.tap(":attention", tt.Entropy()), tt.tap(":attention", tt.Full())) as seen:
        model(q)
    maps = seen[":attention"]["full"]
    expected = -(maps * maps.log()).sum(-1).mean((0, 2))
    got = torch.tensor([float(seen[":attention"]["entropy"][f"head_{i}"]) for i in range(4)])
    torch.testing.assert_close(got, expected)
