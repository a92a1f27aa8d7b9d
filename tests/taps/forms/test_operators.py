"""Sites of operators: values between modules, by module path and function."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchtap as tt
from torchtap.plan.operators import operators_of


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.q(x) @ self.k(x).transpose(-1, -2), dim=-1)
        return weights @ x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ff = Attention(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + torch.relu(self.ff(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


X = torch.linspace(-1, 1, 40).view(2, 5, 4)


def by_hand(model: Model) -> dict[str, Tensor]:
    """The same values, computed with the model's own layers and no hook."""
    found, x = {}, X
    for n, block in enumerate(model.blocks):
        attn = block.attn
        weights = F.softmax(attn.q(x) @ attn.k(x).transpose(-1, -2), dim=-1)
        found[f"blocks.{n}.attn/softmax:output"] = weights
        x = found[f"blocks.{n}/add:output"] = x + weights @ x
        found[f"blocks.{n}/relu:output"] = torch.relu(block.ff(x))
        x = found[f"blocks.{n}/add:output#1"] = x + found[f"blocks.{n}/relu:output"]
    return found


def test_operators_have_the_values_that_the_code_computes(model: Model) -> None:
    with tt.capture(
        model, "blocks.*.attn/softmax", "blocks.*/add", "blocks.*/relu", "blocks.0:output"
    ) as seen:
        model(X)
    expected = by_hand(model)
    assert set(seen) == expected.keys() | {"blocks.0:output"}
    for name, value in expected.items():
        assert torch.equal(seen[name], value), name


def test_a_star_stands_for_the_functions_that_the_code_names(model: Model) -> None:
    with tt.capture(model, "blocks.0/*:output") as seen:
        model(X)
    assert list(seen) == ["blocks.0/add:output", "blocks.0/relu:output", "blocks.0/add:output#1"]


def test_a_star_for_modules_does_not_mean_operators(model: Model) -> None:
    with tt.capture(model, "*:output", "blocks.0.attn/softmax:output") as seen:
        model(X)
    assert [name for name in seen if "/" in name] == ["blocks.0.attn/softmax:output"]


def test_gradients_and_inputs_of_operators(model: Model) -> None:
    with tt.capture(model, "blocks.0.attn/softmax:grad_output", "blocks.0.attn/matmul:input") as seen:
        model(X).square().sum().backward()
    weights = by_hand(model)["blocks.0.attn/softmax:output"].detach().requires_grad_()
    block = model.blocks[0]
    x = X + weights @ X
    rest = model.blocks[1](x + torch.relu(block.ff(x)))
    (gradient,) = torch.autograd.grad(rest.square().sum(), weights)
    torch.testing.assert_close(seen["blocks.0.attn/softmax:grad_output"], gradient)
    assert torch.equal(seen["blocks.0.attn/matmul:input.0#1"], weights)


def test_a_watch_records_operators_at_its_steps_only(model: Model) -> None:
    sink = tt.MemorySink()
    with tt.watch(model, None, [tt.tap("*/softmax:output", every=2)], sinks=[sink]) as watch:
        for _ in range(3):
            with watch.step():
                model(X)
    assert [record.step for record in sink.records] == [0, 2]
    assert sink.records[0].scalars[0].sites == (
        "blocks.0.attn/softmax:output",
        "blocks.1.attn/softmax:output",
    )


def test_an_edit_of_an_operator_changes_what_follows(model: Model) -> None:
    uniform = torch.full((5, 5), 0.2)
    with (
        tt.edit(model, {"blocks.0.attn/softmax:output": uniform}) as edit,
        tt.capture(model, "blocks.0.attn") as seen,
    ):
        model(X)
    assert edit.applied == {"blocks.0.attn/softmax:output": 1}
    torch.testing.assert_close(seen["blocks.0.attn:output"], X.mean(1, keepdim=True).expand(X.shape))


def test_a_function_that_is_not_called_is_reported(model: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.capture(model, "blocks.0/gelu:output") as seen:
            model(X)
    assert [str(each) for each in seen.coverage()] == [
        "blocks.0/gelu:output: no call of torch's gelu was seen in the code of this module itself"
    ]


def test_other_forms_refuse_operators(model: Model) -> None:
    with pytest.raises(tt.FormError, match="is an operator, which only eager models have"):
        tt.capture(torch.compile(model, backend="eager"), "blocks.0/add:output")


def test_nothing_is_left_on_when_the_block_is_over(model: Model) -> None:
    with tt.capture(model, "blocks.0/add:output"), pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 7))
    assert not torch.overrides._get_current_function_mode_stack()
    assert "blocks.0.attn/softmax" in operators_of(model)
