"""Captum by site: the same numbers as Captum itself gives, recorded like any value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import CNN, Structured
from tests.optional import need
from torch import Tensor, nn

import torchtap as tt

attr = need("captum.attr")


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(10, 5)
        self.relu = nn.ReLU()
        self.linear2 = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.relu(self.linear1(x)))


@pytest.fixture
def model() -> Simple:
    torch.manual_seed(0)
    return Simple().eval()


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 10)


@pytest.mark.parametrize("method", ["IntegratedGradients", "DeepLift", "Saliency", "InputXGradient"])
def test_at_the_model_s_input_it_is_the_method_itself(model: Simple, x: Tensor, method: str) -> None:
    found = tt.attribute(model, ":input", method=method, inputs=x, target=0)
    expected = getattr(attr, method)(model).attribute(x.clone().requires_grad_(), target=0)
    torch.testing.assert_close(found, expected.detach(), check_dtype=False)


@pytest.mark.parametrize(
    "method",
    [
        "LayerIntegratedGradients",
        "LayerConductance",
        "LayerDeepLift",
        "LayerGradientXActivation",
        "InternalInfluence",
    ],
)
def test_at_a_layer_it_is_captum_s_layer_method(model: Simple, x: Tensor, method: str) -> None:
    found = tt.attribute(model, "linear1:output", method=method, inputs=x, target=1)
    expected = getattr(attr, method)(model, model.linear1).attribute(x, target=1)
    torch.testing.assert_close(found, expected.detach(), check_dtype=False)
    assert found.shape == (3, 5)


def test_plain_names_stand_for_their_layer_variant(model: Simple, x: Tensor) -> None:
    for plain, layered in {
        "IntegratedGradients": "LayerIntegratedGradients",
        "DeepLift": "LayerDeepLift",
    }.items():
        found = tt.attribute(model, "relu", method=plain, inputs=x, target=0)
        torch.testing.assert_close(found, tt.attribute(model, "relu", method=layered, inputs=x, target=0))


def test_grad_cam_on_a_convolution_and_attribution_to_a_layer_s_input() -> None:
    torch.manual_seed(0)
    model, x = CNN().eval(), torch.randn(2, 3, 6, 6)
    found = tt.attribute(model, "conv2:output", method="LayerGradCam", inputs=x, target=3)
    expected = attr.LayerGradCam(model, model.conv2).attribute(x, target=3)
    torch.testing.assert_close(found, expected.detach())
    found = tt.attribute(model, "fc:input", method="LayerConductance", inputs=x, target=3, n_steps=8)
    expected = attr.LayerConductance(model, model.fc).attribute(
        x, target=3, n_steps=8, attribute_to_layer_input=True
    )
    torch.testing.assert_close(found, expected.detach(), check_dtype=False)


def test_contributions_add_up_to_the_change_of_the_output(model: Simple, x: Tensor) -> None:
    found = tt.attribute(model, ":input", method="IntegratedGradients", inputs=x, target=0, n_steps=300)
    change = (model(x) - model(torch.zeros_like(x)))[:, 0]
    torch.testing.assert_close(found.sum(1), change.detach().to(found.dtype), rtol=1e-2, atol=1e-2)


def test_the_result_is_recorded_and_the_passes_for_it_are_not(
    model: Simple, x: Tensor, tmp_path: Path
) -> None:
    with tt.watch(model, tmp_path / "run", [tt.tap("linear1:output", tt.Full())]) as watch, watch.step():
        model(x)
        found = tt.attribute(model, "linear1", method="LayerConductance", inputs=x, target=0, into=watch)
    run = tt.open(tmp_path / "run")
    torch.testing.assert_close(run.tensor("linear1:value.LayerConductance", step=0), found)
    assert run.tensor("linear1:output").shape == (3, 5)


def test_a_leaf_of_a_structured_output_can_be_the_target() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Structured()

        def forward(self, x: Tensor) -> dict[str, Any]:
            return self.inner({"x": x, "mask": torch.ones_like(x)})

    model, x = Wrapped().eval(), torch.randn(4, 6)
    found = tt.attribute(model, "inner.first:output", inputs=x, target=2, output="logits")
    assert found.shape == (4, 6)
    with pytest.raises(LookupError, match="the model's output has no leaf 'logit'; it has logits"):
        tt.attribute(model, "inner.first:output", inputs=x, target=2, output="logit")


def test_wrong_requests_say_what_is_wrong(model: Simple, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="method 'Magic': known are IntegratedGradients"):
        tt.attribute(model, ":input", method="Magic", inputs=x)
    with pytest.raises(ValueError, match="LayerGradCam is for inner sites"):
        tt.attribute(model, ":input", method="LayerGradCam", inputs=x)
    with pytest.raises(ValueError, match="Saliency is for the model's inputs"):
        tt.attribute(model, "relu", method="Saliency", inputs=x)
    with pytest.raises(ValueError, match="an attribution is of one module's output or input"):
        tt.attribute(model, "linear*:output", inputs=x)
    with pytest.raises(LookupError, match="nearest are"):
        tt.attribute(model, "linear3:output", inputs=x)
    monkeypatch.setitem(__import__("sys").modules, "captum", None)
    with pytest.raises(ImportError, match=r"pip install 'torchtap\[captum\]'"):
        tt.attribute(model, ":input", inputs=x, target=0)
