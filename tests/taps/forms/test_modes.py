"""The ways of running a model that change what a hook sees, and what cannot be tapped at all."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from tests.taps.forms.structures import OneTensor, UsesTensor, UsesTuple
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import torchtap as tt


def forms(model: nn.Module, x: Tensor) -> dict[str, Any]:
    return {
        "eager": model,
        "compiled": torch.compile(model, backend="aot_eager", fullgraph=True),
        "scripted": torch.jit.script(model),
        "fx": fx.symbolic_trace(model),
        "exported": torch.export.export(model, (x,)).module(),
    }


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = OneTensor()
        self.head = nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_value_that_checkpointing_computes_again_is_taken_once(reentrant: bool, compiled: bool) -> None:
    model: Any = Checkpointed(reentrant)
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    with tt.capture(model, "*:output", "*:grad_output") as seen:
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert not [name for name in seen if "#" in name]
    assert {"body.linear:output", "body.linear:grad_output"} <= set(seen)


def test_autocast_shows_in_every_form() -> None:
    model, x = UsesTuple(), torch.randn(3, 4)
    for form, subject in forms(model, x).items():
        if form == "exported":
            continue  # the program has the dtypes it was exported with
        with torch.autocast("cpu", dtype=torch.bfloat16), tt.capture(subject, "*:output") as seen:
            subject(x)
        assert {value.dtype for value in seen.values()} == {torch.bfloat16}, form


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_the_values_come_and_the_gradients_have_a_reason(mode: Any) -> None:
    model, x = UsesTuple(), torch.randn(3, 4)
    for form, subject in forms(model, x).items():
        with mode(), tt.capture(subject, "*:output", "*:grad_output") as seen:
            subject(x)
        assert ":output" in seen, form
        reasons = {missing.reason for missing in seen.coverage() if missing.site.endswith("grad_output")}
        assert reasons == {"the value does not require grad"}, form


def test_functional_call_vmap_and_grad_give_values() -> None:
    model, x = UsesTuple(), torch.randn(3, 4)
    doubled = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    with tt.capture(model, "*:output") as seen:
        output = torch.func.functional_call(model, doubled, (x,))
    assert torch.equal(seen[":output"], output)
    for subject in (model, fx.symbolic_trace(model)):
        with tt.capture(subject, "*:output") as seen:
            torch.func.vmap(subject)(x)
        assert torch.equal(seen["made.linear:output"], model.made.linear(x))
    with tt.capture(model, "*:output") as seen:
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(doubled)
    assert torch.equal(seen[":output"], output)


@pytest.mark.filterwarnings("ignore")
def test_dynamically_quantized_modules_are_tapped() -> None:
    quantized = torch.ao.quantization.quantize_dynamic(
        copy.deepcopy(UsesTuple()), {nn.Linear}, dtype=torch.qint8
    )
    x = torch.randn(3, 4)
    for subject in (quantized, torch.jit.script(quantized), torch.jit.trace(quantized, x)):
        with tt.capture(subject, "*:output") as seen:
            output = subject(x)
        assert torch.equal(seen[":output"], output)
        assert "made.linear:output" in seen


def test_verify_proves_that_taps_change_nothing_and_notices_when_they_do() -> None:
    class Nosy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + len(self._forward_hooks)

    x = torch.randn(3, 4, requires_grad=True)
    model = nn.Sequential(UsesTensor(), nn.Dropout(0.5))
    for subject in (model, torch.compile(model, backend="aot_eager")):
        text = io.StringIO()
        state = torch.get_rng_state()
        result = tt.verify(subject, x, file=text)
        assert result.identical
        assert result.compared["buffers"] == 3
        assert "identical" in text.getvalue()
        assert torch.equal(torch.get_rng_state(), state)
        assert x.grad is None
        assert int(model[0].made.norm.num_batches_tracked) == 0
    assert tt.verify(torch.jit.script(UsesTuple()), x, file=io.StringIO()).identical
    with pytest.raises(tt.VerificationError, match="outputs"):
        tt.verify(nn.Sequential(Nosy(4, 4)), x, file=io.StringIO())


def test_verify_takes_its_inputs_as_compare_does() -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    one, two = torch.ones(2), torch.ones(2)
    for inputs in ((one, two), ((one, two),), ({"a": one, "b": two},)):
        assert tt.verify(Sum(), *inputs, file=io.StringIO()).identical
    assert tt.verify(nn.Identity(), one, file=io.StringIO()).identical


def test_verify_compares_a_loss_and_an_empty_output() -> None:
    class Loss(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x).sum(), x[:0]

    result = tt.verify(Loss(3, 3), torch.randn(2, 3), file=io.StringIO())
    assert result.identical
    assert result.compared["outputs"] == 2


def test_a_form_that_cannot_be_tapped_is_named_with_the_nearest_way_that_works() -> None:
    @torch.jit.script
    def scripted(x: Tensor) -> Tensor:
        return x + 1

    for model, says in (
        (scripted, r"nn\.Module that calls it"),
        (torch.compile(lambda x: x), "give the model itself"),
        ({"weight": torch.zeros(1)}, r"load it into an nn\.Module"),
        ("model.pt", r"tt\.load"),
        (3, r"tt\.instrument"),
    ):
        with pytest.raises(tt.FormError, match=says):
            tt.capture(model)
    with pytest.raises(tt.FormError, match="instrument the model it was made from"):
        tt.instrument(torch.compile(UsesTensor(), backend="eager"))
    with pytest.raises(tt.PlanError, match="cannot be an extra output"):
        tt.extra_outputs(UsesTensor(), "*:grad_output", args=(torch.randn(3, 4),))
