"""The talk on intermediate logging, point by point, and each of its case studies as a program."""

from __future__ import annotations

import io
import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchtap as tt
from torchtap.monitors.torch_module_monitor import ModuleMonitor

EXAMPLES = Path(__file__).parents[2] / "examples"


class Module(nn.Module):
    """With everything that the talk lists: a parameter, a buffer, an argument, a result."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("b", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + self.b


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Module()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.inner(x))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


# -- what passes through a model ------------------------------------------------------------------------------


def test_parameters_buffers_arguments_results_and_all_their_gradients(model: Model, x: Tensor) -> None:
    by_hand: dict[str, Tensor] = {}
    handles = [
        model.inner.register_forward_hook(lambda m, args, out: by_hand.update(input=args[0], output=out)),
        model.inner.register_full_backward_hook(
            lambda m, given, gave: by_hand.update(grad_input=given[0], grad_output=gave[0])
        ),
    ]
    x = x.requires_grad_()
    model(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    expected = {
        **by_hand,
        "param_grad.a": model.inner.a.grad,
        "param.a": model.inner.a,
        "buffer.b": model.inner.b,
    }
    x = x.detach().requires_grad_()
    model.zero_grad()
    kinds = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "buffer")
    with tt.capture(model, *(f"inner:{kind}" for kind in kinds)) as seen:
        model(x).square().sum().backward()
    for name, value in expected.items():
        assert value is not None
        torch.testing.assert_close(seen[f"inner:{name}"], value.detach(), msg=name)


# -- the forms ------------------------------------------------------------------------------------------------


def saved(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def packaged(model: nn.Module) -> Any:
    from torch.package import PackageExporter, PackageImporter

    buffer = io.BytesIO()
    with PackageExporter(buffer) as exporter:
        exporter.intern("test_004_intermediate_logging", allow_empty=True)
        exporter.extern("**")
        exporter.save_pickle("model", "model.pkl", model)
    buffer.seek(0)
    return PackageImporter(buffer).load_pickle("model", "model.pkl")


FORMS: dict[str, Any] = {
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "scripted": torch.jit.script,
    "FX": fx.symbolic_trace,
    "pickled": saved,
    "packaged": packaged,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_the_same_in_every_form(form: str, model: Model, x: Tensor) -> None:
    sites = ("inner:output", "inner:grad_output", "linear:output", "linear:grad_output")
    with tt.capture(model, *sites) as eager:
        model(x).square().sum().backward()
    changed = FORMS[form](tt.instrument(model, *sites) if form != "compiled" else model)
    with tt.capture(changed, *sites) as seen:
        changed(x).square().sum().backward()
    for site in sites:
        torch.testing.assert_close(seen[site], eager[site], msg=f"{form}: {site}")
    torch._dynamo.reset()


# -- gradients of a value that several modules use --------------------------------------------------------------


class Heads(nn.Module):
    """Two heads on one trunk, one of which is far louder."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.loud, self.quiet = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.trunk(x)
        return self.loud(shared), self.quiet(shared)


def test_the_gradient_that_each_head_sends_back(x: Tensor) -> None:
    torch.manual_seed(0)
    model = Heads()
    by_hand: dict[str, Tensor] = {}
    handles = [
        getattr(model, name).register_full_backward_hook(
            lambda m, given, gave, name=name: by_hand.update({name: given[0]})
        )
        for name in ("loud", "quiet")
    ]

    def backward() -> None:
        loud, quiet = model(x)
        (1000 * loud.sum() + 0.01 * quiet.sum()).backward()

    backward()
    for handle in handles:
        handle.remove()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    sites = ["loud:grad_input", "quiet:grad_input"]
    with tt.capture(model, tt.tap(sites, tt.Full(), per_consumer=True)) as own:
        backward()
    for name in ("loud", "quiet"):
        torch.testing.assert_close(own[f"{name}:grad_input"], by_hand[name])
    assert own["loud:grad_input"].norm() > 1000 * own["quiet:grad_input"].norm()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):  # the training is the same
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    model.zero_grad()
    with tt.capture(model, *sites) as both:  # without it: the value's gradient, over all that use it
        backward()
    torch.testing.assert_close(both["quiet:grad_input"], by_hand["loud"] + by_hand["quiet"])


def test_a_head_that_no_loss_uses_sends_nothing_back(x: Tensor) -> None:
    model = Heads()
    with tt.capture(
        model, tt.tap(["loud:grad_input", "quiet:grad_input"], tt.Full(), per_consumer=True)
    ) as seen:
        model(x)[0].sum().backward()
    assert list(seen) == ["loud:grad_input"]


def test_two_backward_passes_of_one_forward_are_both_kept_and_shown(model: Model, x: Tensor) -> None:
    with tt.capture(model, "inner:grad_output") as seen:
        output = model(x)
        output[:, 0].sum().backward(retain_graph=True)
        output[:, 1].sum().backward()
    rows = [model.linear.weight[unit].expand(3, 4) for unit in (0, 1)]
    torch.testing.assert_close(seen["inner:grad_output"], torch.cat(rows))
    assert "inner:grad_output  float32[6, 4]" in repr(seen)


# -- case studies -----------------------------------------------------------------------------------------------


def example(name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()


def test_training_and_serving_part_at_a_line_of_code() -> None:
    found = example("training_and_serving")
    assert found["module"] == "2.norm"
    file, _, rest = found["source"].rpartition(":")
    line, _, name = rest.partition(" ")
    assert name == "(ServedNormalise.forward)"
    assert "def forward" in Path(file).read_text().splitlines()[int(line) - 1]


def test_one_task_s_gradients_drown_the_other_s() -> None:
    found = example("gradients_between_tasks")
    assert found["before"] > 100
    assert 0.1 < found["after"] < 10


def test_half_of_a_layer_is_dead_and_is_cut_out() -> None:
    found = example("dead_neurons")
    assert found["kept"] == 32
    assert found["error"] < 1e-5
    assert "warning: 50% of the units of 1:output fire for no sample of 3 records" in found["findings"]


def test_a_transform_of_ones_own_is_held_against_the_model() -> None:
    found = example("own_fx_transform")
    assert found["wrong"] == "1:output"
    assert found["right"] is False


def test_a_model_in_production_is_given_something_else() -> None:
    assert example("production_statistics") == {"changed": [5, 6, 7]}


def test_the_first_nan_is_found() -> None:
    assert example("nan_hunt") == {"site": "gate:output", "step": 13}


def test_a_tool_of_ones_own_stands_on_the_same_values(model: Model, x: Tensor) -> None:
    monitor = ModuleMonitor(None)
    monitor.set_module(model)
    monitor.add_activation_metric("dead", lambda value: (value == 0).float().mean())
    monitor.begin_step(0)
    model(x)
    monitor.end_step()
    assert monitor.get_step_metrics()["activation/inner/dead"] == 0
