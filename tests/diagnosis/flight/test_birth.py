"""Where a NaN or an infinity is born: operator, module, element, forward or backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt


class Op(nn.Module):
    """A module around one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def net(function: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh(), Op(function)), nn.Linear(6, 2))


def test_a_finite_model_has_none() -> None:
    assert tt.find_nan(net(torch.sigmoid), torch.randn(3, 4)) is None


def test_the_operator_the_element_the_arguments_and_the_line_of_a_forward() -> None:
    def risky(x: Tensor) -> Tensor:
        x = x.abs()
        x[1, 4] = -0.25
        return torch.log(x)

    birth = tt.find_nan(net(risky), torch.randn(3, 4))
    assert birth is not None
    assert (birth.kind, birth.direction, birth.module, birth.site) == ("nan", "forward", "1.1", "1.1:output")
    assert (birth.op, birth.index, birth.count, birth.shape) == ("aten.log.default", (1, 4), 1, (3, 6))
    assert birth.inputs[0].low == -0.25
    assert "risky" in birth.line
    assert "test_birth.py" in birth.line
    assert "1.1" in str(birth)
    assert "aten.log" in str(birth)
    assert birth.to_dict()["op"] == "aten.log.default"


@pytest.mark.parametrize(
    ("function", "node"),
    [
        (lambda x: (x - x.detach()).pow(2).sum(-1, keepdim=True).sqrt() + x, "SqrtBackward0"),
        (lambda x: x + (x * 0).abs().pow(0.5), "PowBackward0"),
        (lambda x: x + (x * 0).norm(dim=-1, keepdim=True).pow(0.5), "PowBackward0"),
    ],
)
def test_a_nan_of_the_backward_alone(function: Any, node: str) -> None:
    model, x = net(function), torch.randn(3, 4)
    assert model(x).isfinite().all()
    birth = tt.find_nan(model, x)
    assert birth is not None
    assert (birth.direction, birth.module, birth.node) == ("backward", "1.1", node)
    assert birth.site == "1.1:grad_input"
    assert tt.find_nan(model, x, backward=False) is None


def test_half_precision_overflows_and_a_pole_does_not() -> None:
    birth = tt.find_nan(net(lambda x: (x.half() * 300 * 300).float()), torch.randn(3, 4))
    assert birth is not None
    assert (birth.kind, birth.dtype, birth.overflow) == ("inf", "float16", True)
    assert "6.55e+04" in str(birth)
    pole = tt.find_nan(net(lambda x: 1 / (x - x)), torch.randn(3, 4))
    assert pole is not None
    assert (pole.kind, pole.overflow) == ("inf", False)


def test_a_mask_is_no_birth_unless_a_nan_comes_of_it() -> None:
    def masked(rows: int) -> Any:
        def function(x: Tensor) -> Tensor:
            mask = torch.zeros(3, 6, dtype=torch.bool)
            mask[:, :3] = True
            mask[:rows] = True
            return x.masked_fill(mask, -math.inf).softmax(-1)

        return function

    assert tt.find_nan(net(masked(0)), torch.randn(3, 4)) is None
    birth = tt.find_nan(net(masked(1)), torch.randn(3, 4))
    assert birth is not None
    assert (birth.kind, birth.op, birth.index) == ("nan", "aten._softmax.default", (0, 0))


def test_a_value_that_came_in_bad_is_named() -> None:
    model, x = net(torch.sigmoid), torch.randn(3, 4)
    x[2, 1] = math.nan
    birth = tt.find_nan(model, x)
    assert birth is not None
    assert (birth.site, birth.op, birth.index) == (":input", "", (2, 1))
    with torch.no_grad():
        model[2].weight[1, 5] = math.inf  # type: ignore[index]
    birth = tt.find_nan(model, torch.randn(3, 4))
    assert birth is not None
    assert (birth.site, birth.kind, birth.index) == ("2:param.weight", "inf", (1, 5))


def test_a_loss_of_the_user_s_is_looked_at_too() -> None:
    birth = tt.find_nan(net(torch.sigmoid), torch.randn(3, 4), loss=lambda out: (out * 0).log().mean())
    assert birth is not None
    assert (birth.kind, birth.op, birth.direction, birth.module) == ("inf", "aten.log.default", "forward", "")


def test_a_harmless_infinity_on_the_way_is_not_what_is_told() -> None:
    def function(x: Tensor) -> Tensor:
        harmless = (x * 0).log().exp()  # log(0) is -inf, its exponential 0
        return x + harmless + torch.sqrt(-x.abs() - 1)

    birth = tt.find_nan(net(function), torch.randn(3, 4), backward=False)
    assert birth is not None
    assert birth.op == "aten.sqrt.default"


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), Op(torch.log))
    x = torch.randn(5, 4)
    model(x).nansum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    copies = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    assert tt.find_nan(model, x) is not None
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is before for p, before in zip(model.parameters(), gradients, strict=True))
    after = [p.grad.nan_to_num() for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(mine, before.nan_to_num()) for mine, before in zip(after, copies, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(tt.FormError, match=r"nn\.Module"):
        tt.find_nan(len, torch.randn(1))  # type: ignore[arg-type]
