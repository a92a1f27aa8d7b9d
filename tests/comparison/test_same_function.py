"""Changes that rearrange the inside of a model and keep its function are not accused, and said to differ inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optional import need
from torch import Tensor, nn

import torchtap as tt


def llama(attention: str = "eager") -> Any:
    transformers = need("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        attn_implementation=attention,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.uniform_(0.5, 1.5)
            layer.post_attention_layernorm.weight.uniform_(0.5, 1.5)
    return model


class Lora(nn.Module):
    """A linear layer with a low-rank branch, as adapters have it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        return result if self.merged else result + self.lora_B(self.lora_A(x))

    def merge(self) -> None:
        self.base_layer.weight += self.lora_B.weight @ self.lora_A.weight
        self.merged = True


def with_adapters(model: Any) -> Any:
    torch.manual_seed(1)
    for layer in model.model.layers:
        for owner, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "up_proj")):
            setattr(owner, name, Lora(getattr(owner, name)))
    return model.eval()


def merged_in_place(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, Lora):
            module.merge()
    return model


def merged_away(model: Any) -> Any:
    merged_in_place(model)
    for layer in model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name, child in list(owner.named_children()):
                if isinstance(child, Lora):
                    setattr(owner, name, child.base_layer)
    return model


def folded(model: Any) -> Any:
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, after in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            for linear in after:
                linear.weight.mul_(norm.weight)
            norm.weight.fill_(1)
    return model


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "norms folded into projections": (lambda model: model, folded),
    "adapters merged in place": (with_adapters, lambda model: merged_in_place(with_adapters(model))),
    "adapters merged and removed": (with_adapters, lambda model: merged_away(with_adapters(model))),
    "adapters in the target alone": (lambda model: merged_away(with_adapters(model)), with_adapters),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_rearranged_model_is_the_same_function_and_differs_inside(change: str) -> None:
    first, second = CHANGES[change]
    with torch.no_grad():
        reference, target = first(llama()), second(llama())
    result = tt.compare(reference, target, inputs={"input_ids": torch.randint(0, 97, (2, 9))})
    assert result.outcome == "same", result.verdict
    assert result.function is not None
    assert result.function.same
    if "removed" not in change and "alone" not in change:  # there the wrapped layers pair with the plain ones
        assert "differ inside" in result.verdict


@pytest.mark.parametrize("change", CHANGES)
def test_a_fault_in_a_rearranged_model_is_found(change: str) -> None:
    first, second = CHANGES[change]
    with torch.no_grad():
        reference, target = first(llama()), second(llama())
        target.model.layers[1].self_attn.o_proj.weight.mul_(1.1)
    result = tt.compare(reference, target, inputs={"input_ids": torch.randint(0, 97, (2, 9))})
    assert result.outcome == "differs"
    assert result.first is not None
    accused = (result.first.module, *result.first.others)
    if "folded" not in change:  # a norm whose block is wrong anyway is accused beside the fault
        accused = accused[:1]
    assert any(module.endswith("layers.1.self_attn.o_proj") for module in accused), result.verdict


def test_kernels_that_treat_padding_differently_are_the_same() -> None:
    reference, target = llama("eager"), llama("sdpa")
    target.load_state_dict(reference.state_dict())
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4] = mask[1, :1] = 0
    tokens = torch.randint(0, 97, (3, 9))
    result = tt.compare(
        copy.deepcopy(reference), target, inputs={"input_ids": tokens, "attention_mask": mask}
    )
    assert result.outcome == "same", result.verdict
    assert result.function is not None
    assert "positions that count" in str(result.function)
