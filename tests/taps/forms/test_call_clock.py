"""The number in a name counts the calls of the module, in every form; and each form is asked as the eager model is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

import torchtap as tt
from torchtap.receive import reasons

PASSED = ("*:input", "*:output", "*:grad_input", "*:grad_output")


class Reused(nn.Module):
    """The first input of the layer is data: only later calls have a gradient of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.f(self.f(x).tanh()).tanh())


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * 2 if mask is None else x * mask


class Optional(nn.Module):
    """Only later calls have the optional argument, and the first result is used last."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Masked()

    def forward(self, x: Tensor) -> Tensor:
        first = self.b(x)
        second = self.b(x, x.sin())
        return self.b(second, x + 1) * 2 + first


def _export(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,)).module()


MAKE: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "compile": lambda model, x: torch.compile(model, backend="aot_eager"),
    "script": lambda model, x: torch.jit.script(model),
    "script, instrumented": lambda model, x: torch.jit.script(tt.instrument(model, *PASSED)),
    "FX, like": lambda model, x: fx.symbolic_trace(model),
    "export, like": _export,
    "export, instrumented": lambda model, x: _export(tt.instrument(model, *PASSED), x),
    "trace, like": lambda model, x: torch.jit.trace(model, x),
    "trace, instrumented": lambda model, x: torch.jit.trace(tt.instrument(model, *PASSED), x),
}


def passed(subject: Any, x: Tensor, calls: int = 1, **options: Any) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.capture(subject, *PASSED, **options) as seen:
            for _ in range(calls):
                subject(x).square().sum().backward()
    return dict(seen)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("form", MAKE)
@pytest.mark.parametrize("make", [Reused, Optional])
def test_calls_without_a_value_are_counted(make: type[nn.Module], form: str, calls: int) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 3, requires_grad=make is Optional)
    expected = passed(model, x, calls)
    options = {"like": model, "inputs": (x,)} if "like" in form else {}
    found = passed(MAKE[form](model, x), x, calls, **options)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_the_expected_numbers_are_those_of_the_module() -> None:
    assert [name for name in passed(Reused(), torch.randn(2, 3)) if "grad_input" in name] == [
        "f:grad_input#1",
        "f:grad_input#2",
    ]


def test_an_edit_counts_as_a_capture_does() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    with tt.capture(model, "0:output") as seen:
        for _ in range(3):
            model(x)
    assert list(seen) == ["0:output", "0:output#1", "0:output#2"]
    with tt.edit(model, {"0:output#2": 0.0}) as edit:
        results = [model(x) for _ in range(3)]
    assert [bool(result.eq(0).all()) for result in results] == [False, False, True]
    assert edit.applied == {"0:output#2": 1}


# -- like=: equal values are told apart -----------------------------------------------------------------------------


class HandsOn(nn.Module):
    """Returns a tensor that it was given, and uses an equal one inside."""

    def __init__(self, op: Callable[[Tensor], Tensor], returns_copy: bool) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.op, self.returns_copy = op, returns_copy

    def forward(self, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        c = self.op(b)
        return (self.l(x) * b + b, c) if self.returns_copy else (self.l(x) * c + c, b)


class Twice(nn.Module):
    def __init__(self, op: Callable[[Tensor], Tensor], returns_copy: bool) -> None:
        super().__init__()
        self.w = nn.Linear(3, 3)
        self.p = nn.ModuleList(HandsOn(op, returns_copy) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, y = self.w(x).square(), x
        for part in self.p:
            y, b = part(y, b)
        return y + b


@pytest.mark.parametrize("returns_copy", [False, True])
@pytest.mark.parametrize("form", ["export, like", "trace, like", "FX, like"])
@pytest.mark.parametrize(
    "op",
    [lambda b: b + 0.0, lambda b: b.clone(), lambda b: b.relu(), lambda b: b.view(3, 3)],
    ids=["add", "clone", "relu", "view"],
)
def test_a_copy_with_equal_values_is_not_taken_for_the_value(
    op: Callable[[Tensor], Tensor], form: str, returns_copy: bool
) -> None:
    torch.manual_seed(0)
    model, x = Twice(op, returns_copy), torch.randn(3, 3)
    expected = passed(model, x)
    found = passed(MAKE[form](model, x), x, like=model, inputs=(x,))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_a_match_leaves_no_gradient_and_no_changed_buffer_behind() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)
    before = copy.deepcopy(model.state_dict())
    tt.match(_export(model, x), model, (x,))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not x.requires_grad


# -- gradients of compiled models -------------------------------------------------------------------------------------


class SharesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.l(x)
        return h, h[:, 0]


def test_the_gradient_of_a_result_that_another_may_be_a_view_of_is_refused_with_a_reason() -> None:
    model, x = SharesMemory(), torch.randn(2, 3, 4)
    compiled = torch.compile(model, backend="aot_eager")
    with tt.capture(compiled, ":grad_output") as seen:
        a, b = compiled(x)
        (a.square().sum() + 3 * b.sum()).backward()
    told = {each.site: each.reason for each in seen.coverage()}
    assert ":grad_output.0" not in seen
    assert told[":grad_output.0"] == reasons.SHARED_MEMORY
    assert seen[":grad_output.1"].shape == (2, 4)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        used_before = h.tanh()
        torch._dynamo.graph_break()
        return self.b(h) + used_before


def test_a_gradient_across_a_graph_break_is_the_whole_one() -> None:
    model, x = Broken(), torch.randn(2, 3, requires_grad=True)
    expected = passed(model, x)
    found = passed(torch.compile(model, backend="aot_eager"), x)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_a_dropout_in_evaluation_hands_on_its_input_in_compiled_code_too() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.l = nn.Dropout(0.5), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            return h + self.l(self.drop(h))

    model, x = Residual().eval(), torch.randn(2, 3, requires_grad=True)
    expected, found = passed(model, x), passed(torch.compile(model, backend="aot_eager"), x)
    torch.testing.assert_close(found["l:grad_input"], expected["l:grad_input"])


# -- names -------------------------------------------------------------------------------------------------------


class OneTuple(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        made = (x * 2,)
        return made  # noqa: RET504 - built in a variable


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = OneTuple()

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        return self.one(x)[0] + 1


@pytest.mark.parametrize("form", ["export, like", "trace, like", "FX, like"])
def test_a_plain_name_finds_the_only_tensor_of_a_structure_that_is_not_known(form: str) -> None:
    model, x = Uses(), torch.randn(2, 3)
    subject = fx.symbolic_trace(model, {"more": None}) if form == "FX, like" else MAKE[form](model, x)
    with tt.capture(subject, "*:output") as seen:
        subject(x)
    assert "one:output" not in list(seen)  # eager calls it one:output.0
    assert torch.equal(seen["one:output"], x * 2)


@pytest.mark.parametrize("form", ["export, like", "trace, like"])
def test_the_only_argument_of_several_has_its_name(form: str) -> None:
    model, x = Uses(), torch.randn(2, 3)
    subject = MAKE[form](model, x)
    with tt.capture(subject, ":input") as seen:
        subject(x)
    assert list(seen) == [":input.x"]


class Told(nn.Module):
    def forward(self, x: Tensor, tell: Callable[[Tensor], None]) -> Tensor:
        tell(x * 2)
        return x + 1


class Side(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = Told()

    def forward(self, x: Tensor) -> Tensor:
        told: list[Tensor] = []
        self.k(x, told.append)
        return told[0] + 3


def test_a_tensor_that_left_by_a_side_door_has_no_plain_name() -> None:
    model, x = Side(), torch.randn(2, 3)
    subject = torch.export.export(model, (x,), strict=False).module()
    with tt.capture(subject, "k:output") as seen:
        subject(x)
    assert "k:output" not in seen


# -- what is refused, and copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", MAKE)
def test_per_consumer_is_refused_where_a_graph_has_only_the_sum(form: str) -> None:
    model, x = Reused(), torch.randn(2, 3)
    tap = tt.tap("f:grad_input", tt.Full(), per_consumer=True)
    with pytest.raises(tt.FormError, match="per_consumer=True needs an eager model"):
        tt.capture(MAKE[form](model, x), tap)


def test_an_edit_of_a_module_that_a_graph_has_taken_apart_is_refused() -> None:
    model, x = Reused(), torch.randn(2, 3)
    with pytest.raises(tt.FormError, match="taken 'f' apart"):
        tt.edit(_export(model, x), {"f:output": 0.0})


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrized_model_is_copied_while_it_is_watched(norm: Callable[[nn.Module], nn.Module]) -> None:
    model, x = nn.Sequential(norm(nn.Linear(3, 3)), nn.ReLU()), torch.randn(2, 3)
    with tt.capture(model, "*:output") as seen:
        made = copy.deepcopy(model)
        torch.optim.swa_utils.AveragedModel(model)
        model(x)
    assert {"0:output", "1:output", ":output"} <= set(seen)
    assert not made[0]._forward_hooks
    assert "__getstate__" not in made[0].__dict__
    assert "__deepcopy__" not in made[0].__dict__
    assert "__deepcopy__" not in model[0].__dict__
