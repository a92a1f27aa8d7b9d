"""A port has names, layouts and code of its own: the verdict says them, and takes no transposed weight for a fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt

WIDTH = 12


class Turned(nn.Module):
    """A Linear that holds its weight as inputs × outputs, as GPT-2's Conv1D does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), Turned(WIDTH, WIDTH)
        self.up, self.down = Turned(WIDTH, 2 * WIDTH), Turned(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = hidden + self.mix(self.norm(hidden)) * (1.0 if scale is None else scale)
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Original(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, scale=torch.ones(()))
        return hidden


class PortedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.n(x) * self.factor)
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Port(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PortedBlock(), PortedBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def ported() -> tuple[Original, Port]:
    torch.manual_seed(0)
    original, port = Original(), Port()
    for block, layer in zip(original.blocks, port.layers, strict=True):
        names = (("norm", "n"), ("mix", "proj"), ("up", "fc1"), ("down", "fc2"))
        for mine, theirs in names:
            source, made = getattr(block, mine), getattr(layer, theirs)
            made.weight.data = (
                source.weight.detach().T.contiguous() if mine != "norm" else source.weight.detach()
            )
            made.bias.data = source.bias.detach().clone()
    return original, port


X = torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(1))


def test_a_right_port_is_the_same_and_its_arguments_have_their_own_names() -> None:
    found = tt.compare(*ported(), inputs=(X,))
    assert found.outcome == "same"
    text = found.explain_alignment()
    assert "blocks.0:input.hidden = layers.0:input:" in text
    assert "layers.0:input.scale" not in text  # the port has no such argument
    assert "blocks.0:input.scale: no such argument" in text
    assert found.row("blocks.1:input.hidden").target_site == "layers.1:input"


def test_a_wrong_bias_is_named_and_the_transposed_square_weight_beside_it_is_not() -> None:
    original, port = ported()
    port.layers[1].proj.bias.data.zero_()
    found = tt.compare(original, port, inputs=(X,))
    assert found.first is not None
    assert found.first.module == "blocks.1.mix"
    assert "(in the target `layers.1.proj`)" in found.verdict
    assert "bias is all zero" in found.verdict
    assert "weight" not in found.verdict
    assert "(PortedBlock.forward)" in found.first.source


def test_a_square_weight_that_was_not_transposed_is_said_to_be_that() -> None:
    original, port = ported()
    port.layers[0].proj.weight.data = original.blocks[0].mix.weight.detach().clone()
    found = tt.compare(original, port, inputs=(X,))
    assert found.first is not None
    assert found.first.module == "blocks.0.mix"
    assert "weight is not transposed, as it is in other layers of these types" in found.first.parameters


def test_an_element_of_a_weight_that_is_held_transposed_is_found() -> None:
    original, port = ported()
    port.layers[0].fc1.weight.data[3, 2] += 1
    found = tt.compare(original, port, inputs=(X,))
    assert found.first is not None
    assert found.first.module == "blocks.0.up"
    assert found.first.parameters == (f"weight differs in 1 of {2 * WIDTH * WIDTH} elements",)


def test_the_code_of_a_container_is_that_of_the_targets_class() -> None:
    original, port = ported()
    port.layers[1].factor = 1.5
    found = tt.compare(original, port, inputs=(X,))
    assert found.first is not None
    assert found.first.module == "blocks.1"
    assert "(in the target `layers.1`)" in found.verdict
    assert "(PortedBlock.forward)" in found.first.source


@pytest.mark.parametrize("inputs", [True, False])
def test_recordings_say_the_targets_name_too(inputs: bool, tmp_path: Path) -> None:
    original, port = ported()
    port.layers[1].fc2.bias.data += 1
    taps = ["*:input", "*:output"] if inputs else ["*:output"]
    for model, name in ((original, "a"), (port, "b")):
        with tt.watch(model, tmp_path / name, taps, keep=tt.Full()) as watch, watch.step(), torch.no_grad():
            model(X)
    found = tt.compare(tmp_path / "a", tmp_path / "b")
    assert found.first is not None
    assert found.first.module == "blocks.1.down"
    assert "`blocks.1.down` (in the target `layers.1.fc2`)" in found.verdict


def test_models_with_the_same_names_have_them_once() -> None:
    original, other = ported()[0], ported()[0]
    other.blocks[1].down.bias.data += 1
    found = tt.compare(original, other, inputs=(X,))
    assert found.first is not None
    assert found.first.module == "blocks.1.down"
    assert "in the target" not in found.verdict
