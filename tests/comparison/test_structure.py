"""Live models whose difference is no number: shapes, absent values, calls, arguments, gradients that do not flow."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from tests.corpus.planted_ports import make_port
from tests.corpus.planted_zoo import build
from torch import Tensor, nn

import torchtap as tt


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.act = nn.ReLU()
        self.down = nn.Linear(width, width)
        self.cut = self.skip = False
        self.scale = 1.0

    def forward(self, x: Tensor, mask: Tensor | None = None, factor: float = 1.0) -> Tensor:
        y = self.norm(x.detach() if self.cut else x)
        y = self.down(self.act(self.up(y)) if not self.skip else torch.relu(self.up(y))) * factor
        return x + (y if mask is None else y * mask)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.masked, self.factor, self.calls = True, 1.0, 1

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.linspace(0, 1, 16) if self.masked else None
        for block in self.blocks:
            for _ in range(self.calls):
                x = block(x, mask, factor=self.factor)
        return self.head(x)


@pytest.fixture
def net() -> Any:
    torch.manual_seed(0)
    return Net()


X = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))


def test_experts_that_get_fewer_tokens_are_the_routers_fault() -> None:
    reference, inputs = build("MoE")
    target: Any = copy.deepcopy(reference)
    target.layers[1].top = 1
    first = tt.compare(reference, target, inputs=inputs).first
    assert first is not None
    assert first.module == "layers.1"
    assert first.sure != "certain"
    assert "shape" in first.what


@pytest.mark.parametrize(
    ("attribute", "value", "word"),
    [("masked", False, "absent"), ("factor", 2.0, "factor=2.0"), ("calls", 2, "called 2 times")],
)
def test_what_the_caller_passes_is_the_callers(net: Any, attribute: str, value: Any, word: str) -> None:
    target = copy.deepcopy(net)
    setattr(target, attribute, value)
    result = tt.compare(net, target, inputs=(X,))
    assert result.outcome == "differs"
    assert result.first is not None
    assert result.first.module == ""
    assert word in result.verdict
    assert "The model's own forward" in result.verdict


def test_a_module_that_is_not_called_is_harmless_when_the_result_agrees(net: Any) -> None:
    target = copy.deepcopy(net)
    target.blocks[1].skip = True
    result = tt.compare(net, target, inputs=(X,))
    assert result.outcome == "same"
    assert [row.site for row in result.rows if row.status == "missing"] == [
        "blocks.1.act:input", "blocks.1.act:output",
    ]  # fmt: skip


def test_a_change_in_place_that_the_reference_does_not_make_is_named(net: Any) -> None:
    target = copy.deepcopy(net)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        out = nn.functional.layer_norm(x, (16,), self.weight, self.bias)
        x.mul_(2.0)
        return out

    target.blocks[1].norm.forward = types.MethodType(forward, target.blocks[1].norm)
    first = tt.compare(net, target, inputs=(X,)).first
    assert first is not None
    assert first.module == "blocks.1.norm"
    assert "in place" in first.what


def test_a_gradient_that_stops_is_the_fault_of_the_code_that_cut_it(net: Any) -> None:
    target = copy.deepcopy(net)
    target.blocks[1].cut = True
    assert tt.compare(net, target, inputs=(X,)).outcome == "same"
    result = tt.compare(net, target, inputs=(X,), gradients=True)
    assert result.outcome == "differs"
    assert result.first is not None
    assert result.first.module == "blocks.1"
    assert "no gradient flows back" in result.verdict


def test_a_frozen_parameter_is_named(net: Any) -> None:
    target = copy.deepcopy(net)
    target.blocks[2].up.weight.requires_grad_(False)
    result = tt.compare(net, target, inputs=(X,), gradients=True)
    assert result.outcome == "differs"
    assert result.first is not None
    assert result.first.module == "blocks.2.up"


def test_gradients_leave_no_trace_and_old_ones_do_not_matter(net: Any) -> None:
    target = copy.deepcopy(net)
    for parameter in target.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = torch.get_rng_state()
    result = tt.compare(net, target, inputs=(X,), gradients=True)
    assert result.outcome == "same"
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(bool((parameter.grad == 1).all()) for parameter in target.parameters())


def test_batch_norm_keeps_its_statistics_when_gradients_are_compared() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).train()
    before = copy.deepcopy(model.state_dict())
    tt.compare(model, copy.deepcopy(model), inputs=(torch.randn(8, 4),), gradients=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_masks_of_other_dtypes_raise_no_alarm(dtype: torch.dtype) -> None:
    reference, inputs = build("bert")
    reference.set_attn_implementation("eager")  # type: ignore[operator]
    result = tt.compare(reference, copy.deepcopy(reference).to(dtype), inputs=inputs)
    assert result.outcome == "same", result.verdict
    assert not [problem for problem in result.problems if "floor" in problem]


def test_half_precision_sees_five_percent() -> None:
    reference, inputs = build("gpt2")
    reference.bfloat16()
    target = copy.deepcopy(reference)
    with torch.no_grad():
        target.get_submodule("transformer.h.1.mlp.c_fc").weight.mul_(1.05)  # type: ignore[operator, union-attr]
    first = tt.compare(reference, target, inputs=inputs).first
    assert first is not None
    assert first.module == "transformer.h.1.mlp.c_fc"
    assert "1.05 × the reference's" in " ".join(first.parameters)


def test_a_fault_that_drowns_in_a_residual_is_not_taken_for_compensated(net: Any) -> None:
    reference = copy.deepcopy(net).bfloat16()
    reference.masked = False
    target = copy.deepcopy(reference)
    with torch.no_grad():
        target.blocks[1].up.weight.view(-1)[3] += 0.5
    first = tt.compare(reference, target, inputs=(X.bfloat16(),)).first
    assert first is not None
    assert first.module == "blocks.1.up"


def test_one_bad_scale_among_good_ones_is_singled_out(net: Any) -> None:
    target = copy.deepcopy(net)
    with torch.no_grad():
        for module in target.modules():
            if isinstance(module, nn.Linear):
                scale = module.weight.abs().amax(1, keepdim=True) / 127
                module.weight.copy_((module.weight / scale).round() * scale)
        assert tt.compare(net, target, inputs=(X,)).outcome == "same"
        target.blocks[1].down.weight.mul_(1.15)
    first = tt.compare(net, target, inputs=(X,)).first
    assert first is not None
    assert first.module == "blocks.1.down"
    assert first.others == ()


def test_several_batches_are_compared_each(net: Any) -> None:
    target = copy.deepcopy(net)
    plain = target.blocks[2].forward
    target.blocks[2].forward = lambda x, mask=None, factor=1.0: (
        plain(x, mask, factor) + (0.1 if x[0, 0] > 50 else 0.0)
    )
    assert tt.compare(net, target, inputs=(X,)).outcome == "same"
    result = tt.compare(net, target, inputs=[(X,), (X + 100,)])
    assert result.outcome == "differs"
    assert result.first is not None
    assert result.first.module == "blocks.2"
    assert "in each of 2 batches" in tt.compare(net, copy.deepcopy(net), inputs=[(X,), (X + 1,)]).verdict


def test_generation_with_a_cache_tells_prefill_from_decode() -> None:
    reference, inputs = build("gpt2")
    model: Any = reference

    def run(each: Any) -> Any:
        past = each(inputs["input_ids"], use_cache=True).past_key_values
        for token in (3, 5):
            past = each(torch.full((2, 1), token), past_key_values=past, use_cache=True).past_key_values

    target = copy.deepcopy(model)
    attention = target.transformer.h[1].attn
    plain = attention.forward

    def forward(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = plain(hidden, *args, **kwargs)
        return (out[0] * 1.1, *out[1:]) if hidden.shape[1] == 1 else out

    attention.forward = types.MethodType(forward, attention)
    assert tt.compare(model, copy.deepcopy(model), inputs=run).outcome == "same"
    first = tt.compare(model, target, inputs=run).first
    assert first is not None
    assert first.site.startswith("transformer.h.1.attn:output")
    assert first.site.endswith("#1")


def test_a_port_is_the_same_and_rules_take_module_paths() -> None:
    port = make_port("GPT-2 and a nanoGPT")
    result = tt.compare(port.reference, port.target, inputs=port.inputs)
    assert result.outcome == "same", result.verdict
    assert "the same values" in result.explain_alignment()
    ruled = tt.compare(
        port.reference,
        port.target,
        inputs=port.inputs,
        rules=["transformer.wte=tok", "transformer.nowhere=tok"],
    )
    assert "transformer.wte:output = tok:output: a rule" in ruled.explain_alignment()
    assert [u.site for u in ruled.unaligned if u.side == "rule"] == ["transformer.nowhere=tok"]


def test_the_alignment_does_not_depend_on_hashing() -> None:
    program = """
import warnings; warnings.filterwarnings("ignore")
import torchtap as tt
from tests.corpus.planted_ports import make_port
port = make_port("Llama and one with fused QKV")
print(tt.compare(port.reference, port.target, inputs=port.inputs).explain_alignment())
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1
    assert "q_proj+k_proj+v_proj:output = blocks.0.wqkv:output" in said.pop()
