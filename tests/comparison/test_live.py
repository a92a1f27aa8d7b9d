"""Two live models: who is to blame, in whatever shape the models come, and with nothing left behind in them."""

from __future__ import annotations

import copy
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.corpus.planted_faults import dropped_residual, folded_norm
from tests.corpus.planted_models import build
from torch import Tensor, nn

import torchtap as tt


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def inputs() -> tuple[Tensor]:
    return (torch.randn(4, 16, generator=torch.Generator().manual_seed(1)),)


def changed(model: nn.Module, path: str, amount: float = 0.1) -> Any:
    copied = copy.deepcopy(model)
    weight = copied.get_parameter(path)
    with torch.no_grad():
        weight.view(-1)[3] += amount
    return copied


def test_a_model_agrees_with_its_copy(net: Net, inputs: Any) -> None:
    result = tt.compare(net, copy.deepcopy(net), inputs=inputs)
    assert result.first is None
    assert {row.status for row in result.rows} == {"equal"}
    assert result.forwards == 2


def test_the_verdict_names_module_place_parameter_and_certainty(net: Net, inputs: Any) -> None:
    result = tt.compare(net, changed(net, "blocks.1.down.weight"), inputs=inputs)
    assert result.first is not None
    assert result.first.site == "blocks.1.down:output"
    assert result.first.module == "blocks.1.down"
    assert result.first.origin == "local"
    assert result.first.healed is True
    assert result.first.parameters == ("weight differs in 1 of 256 elements",)
    assert "channel 0 of 16" in result.verdict
    assert result.first.where is not None
    assert all(element.index[-1] == 0 for element in result.first.where.elements)
    assert "certain" in result.verdict


def test_what_only_passes_an_error_on_is_inherited(net: Net, inputs: Any) -> None:
    result = tt.compare(net, changed(net, "blocks.0.down.weight"), inputs=inputs)
    origins = {row.site: row.origin for row in result.rows if row.status == "diverged"}
    assert origins.pop("blocks.0.down:output") == "local"
    assert set(origins.values()) == {"inherited"}
    assert "head:output" in origins


def test_two_faults_are_both_named(net: Net, inputs: Any) -> None:
    target = changed(changed(net, "blocks.0.up.weight"), "blocks.2.up.weight")
    result = tt.compare(net, target, inputs=inputs)
    assert result.first is not None
    assert result.first.module == "blocks.0.up"
    assert result.first.others == ("blocks.2.up",)


def test_a_fault_in_a_containers_own_code_is_the_containers(net: Net, inputs: Any) -> None:
    reference, given = build("GPT")
    target = copy.deepcopy(reference)
    dropped_residual(target, "blocks.2")
    first = tt.compare(reference, target, inputs=given).first
    assert first is not None
    assert first.module == "blocks.2"
    assert first.site == "blocks.2.norm2:input"


def test_differences_that_cancel_are_compensated_not_wrong() -> None:
    reference, given = build("CNN")
    target = copy.deepcopy(reference)
    folded_norm(target, "blocks.2")
    result = tt.compare(reference, target, inputs=given)
    assert result.first is None
    assert {row.module for row in result.rows if row.status == "compensated"} == {
        "blocks.2.conv1",
        "blocks.2.norm1",
    }
    assert "cancel" in result.verdict


def test_comparing_leaves_both_models_as_they_were(inputs: Any) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    target = changed(reference, "3.weight")
    before = [copy.deepcopy(model.state_dict()) for model in (reference, target)]
    state = torch.get_rng_state()
    result = tt.compare(reference, target, inputs=inputs)
    assert result.first is not None
    assert result.first.module == "3"
    assert torch.equal(state, torch.get_rng_state())
    for model, kept in zip((reference, target), before, strict=True):
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert model.training


def test_a_failing_target_leaves_no_hooks_and_says_what_happened(net: Net, inputs: Any) -> None:
    target = copy.deepcopy(net)
    target.head = nn.Linear(3, 5)
    with pytest.raises(tt.CompareError, match="the target does not run"):
        tt.compare(net, target, inputs=inputs)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())


def test_a_module_that_is_called_twice_is_compared_call_by_call(inputs: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(16, 16)
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(torch.relu(self.shared(x)) * self.scale)

    reference = Twice()
    target = copy.deepcopy(reference)
    target.scale = 2.0
    result = tt.compare(reference, target, inputs=inputs)
    assert result.first is not None
    assert result.first.site == "shared:input#1"
    assert result.first.module == ""


def test_code_that_relies_on_in_place_changes_raises_no_alarm(inputs: Any) -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)
            self.act = nn.ReLU(inplace=True)
            self.out = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lin(x)
            self.act(x)
            return self.out(x)

    reference = Careless()
    noisy = copy.deepcopy(reference)
    noisy.lin.forward = lambda x: (x.double() @ noisy.lin.weight.double().t()).float() + noisy.lin.bias  # type: ignore[method-assign]
    assert tt.compare(reference, noisy, inputs=inputs).first is None
    assert tt.compare(reference, changed(reference, "out.weight"), inputs=inputs).first.module == "out"  # type: ignore[union-attr]


def test_tuples_dicts_and_keyword_arguments_are_compared(inputs: Any) -> None:
    class Odd(nn.Module):
        def __init__(self, fault: float = 0.0) -> None:
            super().__init__()
            self.rnn = nn.LSTM(16, 8, batch_first=True)
            self.fault = fault

        def forward(self, *, x: Tensor, scale: float = 2.0) -> dict[str, Any]:
            hidden, (h, c) = self.rnn(x[None])
            return {"hidden": hidden * scale, "state": [h, c + self.fault]}

    torch.manual_seed(0)
    reference = Odd()
    target = copy.deepcopy(reference)
    target.fault = 0.1
    result = tt.compare(reference, target, inputs={"x": inputs[0], "scale": 3.0})
    assert [row.site for row in result.rows if row.status == "diverged"] == [":output.state.1"]
    assert {"rnn:output.0", "rnn:output.1.1", ":input.x"} <= {row.site for row in result.rows}


def test_integers_have_no_noise_floor(inputs: Any) -> None:
    class Pick(nn.Module):
        def __init__(self, shift: int) -> None:
            super().__init__()
            self.shift = shift

        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1) + self.shift

    assert tt.compare(Pick(0), Pick(0), inputs=inputs).first is None
    assert tt.compare(Pick(0), Pick(1), inputs=inputs).first is not None


def test_a_wrapped_or_renamed_target_is_still_blamed_by_the_references_names(net: Net, inputs: Any) -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    result = tt.compare(net, Wrapper(changed(net, "blocks.1.up.weight")), inputs=inputs)
    assert result.first is not None
    assert result.first.module == "blocks.1.up"
    assert result.first.parameters
    assert tt.compare(net, Wrapper(copy.deepcopy(net)), inputs=inputs).first is None


def test_a_rule_pairs_modules_of_other_names(net: Net, inputs: Any) -> None:
    target = changed(net, "blocks.1.up.weight")
    target.stages = target._modules.pop("blocks")
    target.forward = lambda x: target.head(target.stages[2](target.stages[1](target.stages[0](x))))
    result = tt.compare(net, target, inputs=inputs, rules=["blocks.*=stages.*"])
    assert result.first is not None
    assert result.first.module == "blocks.1.up"


def test_lower_precision_everywhere_is_not_a_fault_but_in_one_place_it_is(net: Net, inputs: Any) -> None:
    assert tt.compare(net, copy.deepcopy(net).bfloat16(), inputs=inputs).first is None
    assert tt.compare(net, copy.deepcopy(net).double(), inputs=inputs).first is None
    target = copy.deepcopy(net)
    low = copy.deepcopy(target.blocks[1].down).bfloat16()
    target.blocks[1].down.forward = lambda x: low(x.bfloat16()).float()  # type: ignore[method-assign]
    first = tt.compare(net, target, inputs=inputs).first
    assert first is not None
    assert first.module == "blocks.1.down"


def test_a_fault_in_a_low_precision_target_is_found(net: Net, inputs: Any) -> None:
    first = tt.compare(net, changed(net, "blocks.2.up.weight", 1.0).bfloat16(), inputs=inputs).first
    assert first is not None
    assert first.module == "blocks.2.up"


def test_nan_in_the_target_alone_is_named_where_it_begins(net: Net, inputs: Any) -> None:
    target = changed(net, "blocks.1.up.weight", math.nan)
    result = tt.compare(net, target, inputs=inputs)
    assert result.first is not None
    assert result.first.module == "blocks.1.up"
    assert "NaN" in result.row("blocks.1.up:output").note


def test_nan_everywhere_is_never_called_equal(net: Net) -> None:
    result = tt.compare(net, copy.deepcopy(net), inputs=(torch.full((4, 16), math.nan),))
    assert result.outcome == "cannot tell"
    assert not result.same


@pytest.mark.parametrize(("width", "first"), [(5, "head:input"), (7, ":output")])
def test_models_that_share_nothing_but_their_input_differ(
    net: Net, inputs: Any, width: int, first: str
) -> None:
    result = tt.compare(net, nn.Sequential(nn.Linear(16, width), nn.Tanh()), inputs=inputs)
    assert result.outcome == "differs"
    assert result.first is not None
    assert result.first.site == first
    assert ("shape is (4, 7)" in result.first.what) == (width == 7)
    assert not result.same
    assert {row.site for row in result.rows if row.status in ("equal", "within")} == {":input"}
    assert len(result.unaligned) > 20
    assert all(each.why for each in result.unaligned)


def test_missing_inputs_are_asked_for(net: Net) -> None:
    with pytest.raises(tt.CompareError, match="inputs="):
        tt.compare(net, net)


def test_a_function_may_run_the_model(net: Net, inputs: Any) -> None:
    result = tt.compare(
        net, changed(net, "head.weight"), inputs=lambda model: [model(inputs[0]) for _ in range(2)]
    )
    assert result.first is not None
    assert result.first.module == "head"
    assert "head:output#1" in {row.site for row in result.rows}


def test_gradients_are_compared_when_the_values_agree(net: Net, inputs: Any) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 1.01

    target = copy.deepcopy(net)
    inner = target.blocks[1].down
    plain = inner.forward
    inner.forward = lambda x: Wrong.apply(plain(x))  # type: ignore[method-assign]
    assert tt.compare(net, target, inputs=inputs).first is None
    result = tt.compare(net, target, inputs=inputs, gradients=True)
    assert result.first is not None
    assert result.first.site == "blocks.1.down:grad_input"
    assert result.first.origin == "local"
    assert {"grad_output", "param_grad"} <= {row.kind for row in result.rows}
    assert (
        tt.compare(net, copy.deepcopy(net), inputs=inputs, gradients=lambda out: out.square().mean()).first
        is None
    )


def test_state_dicts_and_lists_of_layers_can_be_compared(net: Net) -> None:
    target = changed(net, "blocks.1.up.bias")
    result = tt.compare(net.state_dict(), target.state_dict())
    assert result.first is not None
    assert result.first.site == "blocks.1.up.bias"
    layers = [torch.randn(2, 3) for _ in range(4)]
    assert tt.compare(layers, [*layers[:2], layers[2] * 1.1, layers[3]]).first.site == "layer_2:output"  # type: ignore[union-attr]


def test_the_reports_say_the_same_everywhere(net: Net, inputs: Any, tmp_path: Path) -> None:
    result = tt.compare(net, changed(net, "blocks.1.up.weight"), inputs=inputs)
    data = json.loads(result.to_json(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == data
    assert data["first"]["site"] == "blocks.1.up:output"
    assert data["verdict"] == result.verdict == str(result)
    assert {"site", "index", "error", "floor", "status"} <= set(data["rows"][0])
    page = result.to_html(tmp_path / "out.html").read_text()
    assert "blocks.1.up:output" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "Worst elements" in page
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(result.table())
    text = console.export_text()
    assert "blocks.1.up:output" in text
    assert "first" in text


def test_a_row_is_found_by_its_site_and_a_wrong_name_suggests_another(net: Net, inputs: Any) -> None:
    result = tt.compare(net, copy.deepcopy(net), inputs=inputs)
    assert result.row("head:output").status == "equal"
    with pytest.raises(tt.SelectionError, match="head:output"):
        result.row("heda:output")


def test_a_narrow_terminal_shows_numbers_and_status_whole() -> None:
    left, right = nn.Sequential(), nn.Sequential()
    torch.manual_seed(0)
    for model in (left, right):
        model.add_module("a_module_with_a_name_longer_than_half_a_narrow_terminal", nn.Linear(4, 4))
    text = io.StringIO()
    result = tt.compare(left, right, inputs=(torch.randn(2, 4),))
    Console(width=80, file=text).print(result.table())
    assert "…" not in text.getvalue()
    assert "diverged" in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 80


class UsesAWeight(nn.Module):
    """Its forward takes a child's parameters and never calls the child, as state-space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(6, 6)
        self.step = nn.Linear(6, 6)
        self.up = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.down(x)
        return self.up(torch.tanh(inside @ self.step.weight.T + self.step.bias))


def test_a_parameter_of_a_module_that_is_never_called_is_named_with_its_module() -> None:
    torch.manual_seed(0)
    right = nn.Sequential(nn.Linear(6, 6), UsesAWeight(), nn.Linear(6, 6))
    wrong = copy.deepcopy(right)
    with torch.no_grad():
        wrong[1].step.bias[2] += 0.5
    result = tt.compare(right, wrong, inputs=(torch.randn(4, 6),))
    assert result.first is not None
    assert result.first.module == "1.step"
    assert "bias differs in 1 of 6 elements" in result.verdict
