"""``torchtap sites`` lists what a run can give, and nothing that it cannot."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchtap as tt
from torchtap.cli.sites import can_come
from torchtap.plan.plan import candidates
from torchtap.plan.sites import places


def listed(model: nn.Module) -> set[str]:
    return {names[0].name for names in candidates(places(model)) if can_come(names[0])}


def attend(query: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, query, query)


class InAHelper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def _mix(self, x: Tensor) -> Tensor:
        return sum(attend(x) for _ in range(1))

    def forward(self, x: Tensor) -> Tensor:
        tt.emit("before", x)
        return self.proj(self._mix(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InAHelper(), nn.MultiheadAttention(4, 2, batch_first=True)])
        self.named = nn.ModuleDict({"head": nn.Linear(4, 2)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x, _ = self.blocks[1](x, x, x)
        return self.named["head"](x)


def test_attention_is_listed_for_the_modules_that_attend_and_for_no_others() -> None:
    names = {name for name in listed(Model()) if name.endswith(":attention")}
    assert names == {"blocks.0:attention", "blocks.1:attention"}


def test_named_values_are_listed_where_they_are_named() -> None:
    assert {name for name in listed(Model()) if ":value" in name} == {"blocks.0:value"}


def test_a_container_that_is_never_called_has_no_values() -> None:
    names = listed(Model())
    assert not {name for name in names if name.startswith(("blocks:", "named:"))}
    assert {"blocks.0:output", "named.head:output", ":output"} <= names


def test_what_a_run_gives_is_listed() -> None:
    """The other direction: whatever a capture of everything sees must have been listed."""
    model = Model()
    with tt.capture(model, ["*:output", "*:input", "*:attention", "*:value"]) as seen:
        model(torch.randn(2, 3, 4))
    bare = {f"{name.partition(':')[0]}:{name.partition(':')[2].partition('.')[0]}" for name in seen}
    assert bare <= listed(model), bare - listed(model)


@pytest.mark.parametrize("implementation", ["sdpa"])
def test_a_hugging_face_model_is_looked_into_through_its_table_of_functions(implementation: str) -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation=implementation,
    )
    names = {name for name in listed(LlamaModel(config)) if name.endswith(":attention")}
    assert names == {"layers.0.self_attn:attention", "layers.1.self_attn:attention"}
