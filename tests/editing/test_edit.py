"""Editing: what is put in arrives, gradients follow, and a capture sees both sides."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from tests.models import CNN, GPT, Structured, Tagger, Thrice
from torch import Tensor, nn

import torchtap as tt


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=3)


@pytest.fixture
def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 11, (2, 6))


def test_a_function_changes_the_value_on_its_way(model: GPT, tokens: Tensor) -> None:
    x = model.embedding(tokens)
    x = model.blocks[1](model.blocks[0](x) * 2)
    expected = model.head(model.norm(model.blocks[2](x)))
    with tt.edit(model, {"blocks.0:output": lambda value: value * 2}) as edited:
        changed = model(tokens)
    assert torch.equal(changed, expected)
    assert not torch.equal(model(tokens), expected)
    assert edited.applied == {"blocks.0:output": 1}


def test_a_head_can_be_silenced(model: GPT, tokens: Tensor) -> None:
    """Zeroing a head's part of the projection's input is the same as zeroing the columns that read it."""

    def without_head_2(value: Tensor) -> Tensor:
        heads = value.unflatten(-1, (4, 4)).clone()
        heads[..., 2, :] = 0
        return heads.flatten(-2)

    with tt.edit(model, {"blocks.1.attn.proj:input": without_head_2}):
        silenced = model(tokens)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[1].attn.proj.weight[:, 8:12] = 0
    torch.testing.assert_close(silenced, other(tokens))


def test_a_steering_vector_is_added_and_gets_its_gradient(model: GPT, tokens: Tensor) -> None:
    vector = torch.zeros(16, requires_grad=True)
    with tt.edit(model, {"blocks.1:output": lambda value: value + vector}):
        output = model(tokens)
        output.square().sum().backward()
    assert torch.equal(output, model(tokens))
    shift = torch.zeros(16)
    shift[3] = 1e-3
    with tt.edit(model, {"blocks.1:output": lambda value: value + shift}):
        there = model(tokens).square().sum()
    with tt.edit(model, {"blocks.1:output": lambda value: value - shift}):
        back = model(tokens).square().sum()
    assert vector.grad is not None
    assert vector.grad[3].item() == pytest.approx((there - back).item() / 2e-3, rel=2e-2)


def test_a_recorded_value_is_put_in_and_the_rest_follows(model: GPT, tokens: Tensor, tmp_path: Path) -> None:
    with tt.watch(model, tmp_path / "run", [tt.tap("blocks.1:output", tt.Full())]) as watch, watch.step():
        expected = model(tokens)
    recorded = tt.open(tmp_path / "run").tensor("blocks.1:output")
    other = torch.randint(0, 11, (2, 6))
    assert not torch.equal(model(other), expected)
    with tt.edit(model, {"blocks.1:output": recorded}):
        assert torch.equal(model(other), expected)


def test_a_replacement_takes_the_gradient_away_from_what_it_replaced(model: GPT, tokens: Tensor) -> None:
    replacement = torch.randn(2, 6, 16, requires_grad=True)
    with tt.edit(model, {"blocks.0:output": replacement}):
        model(tokens).sum().backward()
    assert replacement.grad is not None
    assert model.blocks[0].mlp[0].weight.grad is None
    assert model.blocks[1].mlp[0].weight.grad is not None


def test_captures_outside_and_inside_see_before_and_after(model: GPT, tokens: Tensor) -> None:
    site = "blocks.1:output"
    with (
        tt.capture(model, site) as before,
        tt.edit(model, {site: lambda value: value.clone().fill_(3)}),
        tt.capture(model, site, "blocks.2:input") as after,
    ):
        model(tokens)
    with tt.capture(model, site) as plain:
        model(tokens)
    assert torch.equal(before[site], plain[site])
    assert torch.equal(after[site], torch.full((2, 6, 16), 3.0))
    assert torch.equal(after["blocks.2:input"], after[site])


def test_a_gradient_is_changed_between_its_two_sides(model: GPT, tokens: Tensor) -> None:
    site = "blocks.1:grad_output"
    with (
        tt.capture(model, site) as towards_the_module,
        tt.edit(model, {site: lambda gradient: gradient * 0.5}) as edited,
        tt.capture(model, site) as from_the_loss,
    ):
        model(tokens).square().sum().backward()
    assert torch.equal(towards_the_module[site], from_the_loss[site] * 0.5)
    assert edited.applied == {site: 1}
    halved = model.blocks[1].mlp[2].weight.grad
    unchanged = model.blocks[2].mlp[2].weight.grad
    model.zero_grad()
    model(tokens).square().sum().backward()
    assert torch.allclose(halved, model.blocks[1].mlp[2].weight.grad / 2)
    assert torch.equal(unchanged, model.blocks[2].mlp[2].weight.grad)


def test_one_leaf_of_a_structure_is_changed_and_the_others_stay() -> None:
    tagger, x = Tagger(), torch.randn(2, 5, 8)
    y, (h, c) = tagger.lstm(x)
    with tt.edit(tagger, {"lstm:output.1.0": lambda value: value + 1}):
        y2, state = tagger.lstm(x)
    assert torch.equal(y2, y)
    assert torch.equal(state[0], h + 1)
    assert torch.equal(state[1], c)


def test_a_keyword_input_and_a_dataclass_field_are_reached_by_name() -> None:
    torch.manual_seed(0)
    model = Structured()
    batch = {"x": torch.randn(4, 6), "mask": torch.ones(4, 6)}
    with tt.edit(model, {"inner:input.mask": 0.0}):
        masked = model(batch)["logits"]
    assert torch.equal(masked, model.inner.fc.bias.expand(4, 3))
    plain = model(batch)["logits"]
    with tt.edit(model, {"inner:output.logits": lambda value: -value}):
        assert torch.equal(model(batch)["logits"], -plain)


def test_one_call_of_a_reused_module_is_changed_alone() -> None:
    model, x = Thrice(), torch.randn(2, 5)
    once = torch.tanh(model.shared(x))
    expected = torch.tanh(model.shared(torch.tanh(model.shared(once) * 2)))
    with tt.edit(model, {"shared:output#1": lambda value: value * 2}) as edited:
        assert torch.equal(model(x), expected)
        assert not torch.equal(model(x), expected)  # these are the calls 3 to 5, as in a capture
    assert edited.applied == {"shared:output#1": 1}


def test_an_edit_goes_on_in_the_repetition_of_a_checkpoint(tokens: Tensor) -> None:
    gradients = []
    for checkpointed in (None, "non_reentrant"):
        torch.manual_seed(0)
        model = GPT(checkpointed=checkpointed)
        with tt.edit(model, {"blocks.0.attn:output": lambda value: value * 2}):
            model(tokens).square().sum().backward()
        gradients.append(model.blocks[0].attn.qkv.weight.grad)
    torch.testing.assert_close(*gradients)


def test_a_compiled_model_is_edited_too(model: GPT, tokens: Tensor) -> None:
    compiled = torch.compile(model, backend="eager")
    plain = compiled(tokens)
    with tt.edit(compiled, {"blocks.0:output": 0.0}):
        changed = compiled(tokens)
    with tt.edit(model, {"blocks.0:output": 0.0}):
        torch.testing.assert_close(changed, model(tokens))
    torch.testing.assert_close(compiled(tokens), plain)
    torch._dynamo.reset()


def test_a_model_that_works_in_place_changes_neither_the_replacement_nor_the_rules() -> None:
    model, x = CNN(inplace=True), torch.randn(2, 3, 6, 6)
    replacement = torch.full((2, 6, 6, 6), -1.0, requires_grad=True)
    with tt.edit(model, {"bn1:output": replacement}):
        model(x).sum().backward()
    assert replacement.grad is not None
    assert torch.equal(replacement, torch.full((2, 6, 6, 6), -1.0))
    model.zero_grad()
    with tt.edit(model, {"bn1:grad_output": lambda gradient: gradient * 0}):
        model(x).sum().backward()
    assert not model.bn1.weight.grad.any()
    assert model.fc.weight.grad.any()


def test_leaving_takes_everything_off_even_if_the_body_raised(model: GPT, tokens: Tensor) -> None:
    expected = model(tokens)
    with (
        pytest.raises(KeyError),
        tt.edit(model, {"*:output": lambda value: value * 1, "*:input": lambda v: v}),
    ):
        model(tokens)
        raise KeyError("the body's own")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(tokens), expected)


def test_a_copy_made_inside_is_not_edited(model: GPT, tokens: Tensor) -> None:
    with tt.edit(model, {"blocks.0:output": 0.0}):
        copied = copy.deepcopy(model)
        model(tokens)
    assert torch.equal(copied(tokens), model(tokens))


def test_wrong_edits_say_what_is_wrong(model: GPT, tokens: Tensor) -> None:
    with pytest.raises(LookupError, match=r"'blocks.7:output' matches none of .* nearest are 'blocks"):
        tt.edit(model, {"blocks.7:output": 0.0})
    with pytest.raises(ValueError, match="an edit needs at least one change"):
        tt.edit(model, {})
    with pytest.raises(ValueError, match="cannot be edited: the kinds that pass through a forward are input"):
        tt.edit(model, {"norm:param.weight": 0.0})
    with pytest.raises(ValueError, match=r"the change of 'norm' is a str: give a function"):
        tt.edit(model, {"norm": "zero"})  # type: ignore[dict-item]
    with (
        pytest.raises(ValueError, match=r"shape \(5,\) cannot take the place of norm:output, which has"),
        tt.edit(model, {"norm": torch.zeros(5)}),
    ):
        model(tokens)
    with (
        pytest.raises(ValueError, match="the edit of norm:output returned NoneType"),
        tt.edit(model, {"norm": lambda value: None}),  # type: ignore[dict-item, return-value]
    ):
        model(tokens)
    with pytest.raises(TypeError, match="an edit needs modules that Python runs, and this model is script"):
        tt.edit(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), {"0": 0.0})


def test_an_edit_that_nothing_met_is_warned_of() -> None:
    model = Thrice()
    with pytest.warns(RuntimeWarning, match="nothing passed at never:output while it was edited"):
        with tt.edit(model, {"never:output": 0.0, "shared:output": lambda value: value}):
            model(torch.zeros(1, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tt.edit(model, {"shared:output": lambda value: value}):
            model(torch.zeros(1, 5))
