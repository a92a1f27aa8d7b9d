"""Intermediate values as a model's outputs: eager, compiled, exported, scripted, and cut short."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from tests.models import CNN, GPT, Tagger, Thrice
from torch import Tensor, nn

import torchtap as tt

SITES = ["blocks.0:output", "blocks.1.attn:output", "blocks.1.mlp.1:input"]


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT()


@pytest.fixture
def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 11, (2, 6))


def expected(model: nn.Module, x: Tensor, *sites: str) -> dict[str, Tensor]:
    with tt.capture(model, *sites) as seen:
        model(x)
    return {site: seen[site] for site in sites}


def assert_same(values: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(values) == list(wanted)
    for site, value in values.items():
        torch.testing.assert_close(value, wanted[site])


def test_the_output_and_the_values_are_those_of_the_model(model: GPT, tokens: Tensor) -> None:
    output, values = tt.features(model, SITES)(tokens)
    assert torch.equal(output, model(tokens))
    for site, value in expected(model, tokens, *SITES).items():
        assert torch.equal(values[site], value)


def test_gradients_flow_through_the_values_and_with_respect_to_them(model: GPT, tokens: Tensor) -> None:
    output, values = tt.features(model, SITES)(tokens)
    with tt.capture(model, "blocks.0:grad_output") as seen:
        model(tokens).sum().backward(inputs=list(model.blocks[0].parameters()))
    (gradient,) = torch.autograd.grad(output.sum(), values["blocks.0:output"], retain_graph=True)
    torch.testing.assert_close(gradient, seen["blocks.0:grad_output"])
    model.zero_grad()
    values["blocks.0:output"].square().sum().backward()
    assert model.blocks[0].mlp[0].weight.grad is not None
    assert model.blocks[1].mlp[0].weight.grad is None


def test_the_model_is_not_touched_and_its_tensors_are_shared(model: GPT, tokens: Tensor) -> None:
    extractor = tt.features(model, SITES)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert {id(p) for p in extractor.parameters()} == {id(p) for p in model.parameters()}
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    assert torch.equal(extractor(tokens)[0], model(tokens))
    extractor.to(torch.float64)
    assert model.norm.weight.dtype == torch.float64


def test_running_statistics_are_shared_too() -> None:
    model = CNN()
    tt.features(model, "conv1")(torch.randn(2, 3, 6, 6))
    assert model.bn1.running_mean.any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_in_one_graph(model: GPT, tokens: Tensor, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tt.features(model, SITES), backend=backend, fullgraph=True)
    for _ in range(2):
        output, values = compiled(tokens)
        torch.testing.assert_close(output, model(tokens))
        assert_same(values, expected(model, tokens, *SITES))
    values["blocks.0:output"].sum().backward()
    assert model.blocks[0].ln1.weight.grad is not None


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_it_exports(model: GPT, tokens: Tensor, strict: bool) -> None:
    program = torch.export.export(tt.features(model, SITES), (tokens,), strict=strict)
    output, values = program.module()(tokens)
    torch.testing.assert_close(output, model(tokens))
    assert_same(values, expected(model, tokens, *SITES))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_it_scripts_and_the_script_is_differentiable(model: GPT, tokens: Tensor, tmp_path: object) -> None:
    scripted = torch.jit.script(tt.features(model, SITES))
    torch.jit.save(scripted, f"{tmp_path}/features.pt")
    output, values = torch.jit.load(f"{tmp_path}/features.pt")(tokens)
    torch.testing.assert_close(output, model(tokens))
    assert_same(values, expected(model, tokens, *SITES))
    _, values = scripted(tokens)
    values["blocks.0:output"].sum().backward()
    assert model.blocks[0].ln1.weight.grad is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_one_leaf_of_a_tuple_is_scripted_by_its_name() -> None:
    model, x = Tagger(), torch.randn(2, 5, 8)
    _, values = torch.jit.script(tt.features(model, ["lstm:output.0", "fc:input"]))(x)
    assert_same(values, expected(model, x, "lstm:output.0", "fc:input"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_until_stops_there_in_every_form(model: GPT, tokens: Tensor) -> None:
    torch._dynamo.reset()
    cut = tt.features(model, "blocks.0:output", until="blocks.0:output")
    wanted = expected(model, tokens, "blocks.0:output")
    with tt.capture(cut.model, "*:output") as seen:
        output, values = cut(tokens)
    assert output is None
    assert_same(values, wanted)
    assert not [site for site in seen if site.startswith(("blocks.1", "norm", "head"))]
    compiled = torch.compile(cut, backend="eager", fullgraph=True)
    program = torch.export.export(cut, (tokens,))
    for form in (compiled, program.module(), torch.jit.script(cut)):
        output, values = form(tokens)
        assert output is None
        assert_same(values, wanted)
    strict = torch.export.export(cut, (tokens,), strict=True)
    for cut_program in (strict, program.run_decompositions({})):
        attentions = [node for node in cut_program.graph.nodes if "scaled_dot_product" in str(node.target)]
        assert len(attentions) == 1


def test_leaves_and_calls_have_names_of_their_own() -> None:
    x = torch.randn(2, 5, 8)
    _, values = tt.features(Tagger(), "lstm:output")(x)
    assert list(values) == ["lstm:output.0", "lstm:output.1.0", "lstm:output.1.1"]
    _, values = tt.features(Thrice(), ["shared:output"])(torch.randn(2, 5))
    assert list(values) == ["shared:output", "shared:output#1", "shared:output#2"]


def test_a_value_changed_in_place_later_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with pytest.warns(RuntimeWarning, match=r"0:output was changed in place by a later module"):
        tt.features(model, "0:output")(torch.randn(2, 3))


def test_wrong_requests_say_what_is_wrong(model: GPT) -> None:
    with pytest.raises(LookupError, match="nearest are"):
        tt.features(model, "blocs.0:output")
    with pytest.raises(ValueError, match="features needs at least one site"):
        tt.features(model, [])
    with pytest.raises(ValueError, match="features are of the kinds output and input"):
        tt.features(model, "norm:param.weight")
    with pytest.raises(ValueError, match="until= has to pick one place, and picks 2"):
        tt.features(model, "norm", until="blocks.*:output")
    with pytest.raises(
        LookupError, match="never:output did not pass in this call: its module was not called"
    ):
        tt.features(Thrice(), "never:output")(torch.randn(2, 5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_model_that_cannot_be_traced_says_so_when_scripted() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.sum() > 0 else x

    with pytest.raises(TypeError, match=r"features of this Branching cannot be scripted.* compile or export"):
        torch.jit.script(tt.features(Branching(), "fc"))


def saved_and_loaded(extractor: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(extractor, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), saved_and_loaded]
)
def test_a_copy_gives_the_values_too_and_keeps_its_mode(
    model: GPT, tokens: Tensor, again: Callable[[nn.Module], nn.Module]
) -> None:
    extractor = tt.features(model, SITES, until="blocks.1:output").eval()
    second = again(extractor)
    assert not any(module.training for module in second.modules())
    assert_same(second(tokens)[1], extractor(tokens)[1])
    with torch.no_grad():  # a copy has parameters of its own
        next(second.parameters()).zero_()
    assert next(extractor.parameters()).any()
