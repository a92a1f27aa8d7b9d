"""The guide to recording the output of every layer, section by section, with its own snippets.

The guide changes a model's source; here nothing is changed. The model has 62 decoder layers as the guide's has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.optional import need
from torch import Tensor, nn

import torchtap as tt
from torchtap.cli import main


class Decoder(nn.Module):
    """An embedding, 62 decoder layers, a final norm."""

    def __init__(self, width: int = 16, layers: int = 62) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states)
        return self.norm(hidden_states)

    def recorded_by_hand(self, input_ids: Tensor) -> list[Tensor]:
        """The guide's change of the model's forward."""
        hidden_states = self.embed_tokens(input_ids)
        layer_hidden_states = [hidden_states.clone()]
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states)
            layer_hidden_states.append(hidden_states.clone())
        return layer_hidden_states


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 50, (1, 32), generator=torch.Generator().manual_seed(0))}


@pytest.fixture
def full_model(model: Decoder, inputs: dict[str, Tensor], tmp_path: Path) -> Path:
    with tt.record_layers(model, tmp_path / "full_model"), torch.no_grad():
        model(**inputs)
    return tmp_path / "full_model"


@pytest.fixture
def show(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``torchtap show``."""

    def run(*words: object) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["show", *(str(word) for word in words)])
        assert not stop.value.code
        return capfd.readouterr().out

    return run


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# -- How it works ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record_layer_outputs", [True, False])
def test_one_option_switches_it_on(
    model: Decoder, inputs: dict[str, Tensor], record_layer_outputs: bool
) -> None:
    expected = model(**inputs)
    with tt.record_layers(model, record_layer_outputs=record_layer_outputs) as recorder:
        outputs = model(**inputs)
    assert torch.equal(outputs, expected)  # the signature and the result are as before
    assert len(recorder.passes) == record_layer_outputs


def test_the_layers_are_those_of_the_thread_that_ran_the_model(
    model: Decoder, inputs: dict[str, Tensor]
) -> None:
    from torchtap import get_layer_hidden_states

    with tt.record_layers(model):
        model(**inputs)
        layer_hidden_states = get_layer_hidden_states()
    assert layer_hidden_states is not None
    assert same(layer_hidden_states, model.recorded_by_hand(**inputs))
    assert not any(state.requires_grad for state in layer_hidden_states)


def test_a_compiled_model_is_recorded_without_compiling_again(
    model: Decoder, inputs: dict[str, Tensor]
) -> None:
    small = Decoder(layers=3).eval()
    compiled = torch.compile(small, backend="aot_eager")
    with torch.no_grad():
        compiled(**inputs)
        with tt.record_layers(compiled):
            compiled(**inputs)
        recorded = tt.get_layer_hidden_states()
        assert recorded is not None
        for found, expected in zip(recorded, small.recorded_by_hand(**inputs), strict=True):
            torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_models_are_recorded(inputs: dict[str, Tensor]) -> None:
    small = Decoder(layers=3).eval()
    scripted = torch.jit.script(small)
    with tt.record_layers(scripted), torch.no_grad():
        scripted(**inputs)
    recorded = tt.get_layer_hidden_states()
    assert recorded is not None
    for found, expected in zip(recorded, small.recorded_by_hand(**inputs), strict=True):
        torch.testing.assert_close(found, expected)


# -- Output files ---------------------------------------------------------------------------------------------


def test_the_files_are_those_of_the_guide(full_model: Path) -> None:
    assert {path.name for path in full_model.iterdir()} == {
        "embedding_output.pt",
        *(f"layer_{number}_output.pt" for number in range(1, 63)),
        "statistics.pt",
        "metadata.pt",
        "run",
    }


# -- Analysing them -------------------------------------------------------------------------------------------


def test_statistics_are_looked_at(full_model: Path, show: Callable[..., str]) -> None:
    stats = torch.load(full_model / "statistics.pt")
    lines = []
    for layer_name in sorted(stats.keys()):
        stat = stats[layer_name]
        lines.append(
            f"{layer_name}: Mean={stat['mean']:.6f}, Std={stat['std']:.6f}, "
            f"NaN={stat['has_nan']}, Inf={stat['has_inf']}"
        )
    assert set(lines) <= set(show(full_model, "--rows", 100).splitlines())
    assert len(lines) == 63


def test_a_layer_is_loaded(full_model: Path, model: Decoder, inputs: dict[str, Tensor]) -> None:
    layer_30 = torch.load(full_model / "layer_30_output.pt")
    assert layer_30.shape == torch.Size([1, 32, 16])
    assert torch.equal(layer_30, model.recorded_by_hand(**inputs)[30])
    assert (
        f"{layer_30.float().mean():.6f}" == f"{tt.open_layers(full_model).statistics['layer_30']['mean']:.6f}"
    )
    assert not torch.isnan(layer_30).any()


def test_adjacent_layers_are_compared(full_model: Path) -> None:
    layer_30 = torch.load(full_model / "layer_30_output.pt")
    layer_31 = torch.load(full_model / "layer_31_output.pt")
    diff = (layer_31 - layer_30).abs()
    change = tt.layer_changes(full_model)[30]
    assert change.measures is not None
    assert change.measures.max_abs == pytest.approx(diff.max().item())
    assert change.measures.mean_abs == pytest.approx(diff.mean().item())


def test_two_devices_are_compared(
    full_model: Path, model: Decoder, inputs: dict[str, Tensor], tmp_path: Path
) -> None:
    gpu_reference = tmp_path / "gpu_reference"
    with torch.no_grad():
        model.layers[29][0].weight.mul_(1.01)  # type: ignore[index, union-attr, operator]
    with tt.record_layers(model, gpu_reference), torch.no_grad():
        model(**inputs)
    neuron_layer_30 = torch.load(full_model / "layer_30_output.pt")
    gpu_layer_30 = torch.load(gpu_reference / "layer_30_output.pt")
    diff = (neuron_layer_30 - gpu_layer_30).abs()
    relative_diff = diff / (gpu_layer_30.abs() + 1e-8)
    cosine_sim = torch.nn.functional.cosine_similarity(
        neuron_layer_30.flatten(), gpu_layer_30.flatten(), dim=0
    )

    result = tt.compare(gpu_reference, full_model)
    measures = result.row("layer_30:output").measures
    assert measures is not None
    assert measures.max_abs == pytest.approx(diff.max().item(), rel=1e-5)
    assert measures.mean_rel == pytest.approx(relative_diff.mean().item(), rel=1e-4)
    assert measures.cosine == pytest.approx(cosine_sim.item(), abs=1e-6)
    assert result.first is not None
    assert result.first.site == "layer_30:output"


# -- Questions ------------------------------------------------------------------------------------------------


def test_the_layer_with_a_problem_is_found(model: Decoder, inputs: dict[str, Tensor], tmp_path: Path) -> None:
    with torch.no_grad():
        model.layers[40][0].bias[3] = float("nan")  # type: ignore[index, union-attr]
    with tt.record_layers(model, tmp_path / "broken"), torch.no_grad():
        model(**inputs)
    stats = torch.load(tmp_path / "broken" / "statistics.pt")
    bad = [name for name, stat in stats.items() if stat["has_nan"] or stat["has_inf"]]
    assert bad[0] == "layer_41"


def test_only_some_layers_are_recorded_and_keep_their_numbers(
    full_model: Path, model: Decoder, inputs: dict[str, Tensor], tmp_path: Path
) -> None:
    with tt.record_layers(model, tmp_path / "some", layers=[0, 30, 61]) as recorder, torch.no_grad():
        model(**inputs)
    files = {path.name for path in (tmp_path / "some").glob("*_output.pt")}
    assert files == {"layer_1_output.pt", "layer_31_output.pt", "layer_62_output.pt"}
    assert recorder.passes[0].layers == (1, 31, 62)
    by_hand = model.recorded_by_hand(**inputs)
    recorded = tt.get_layer_hidden_states()
    assert recorded is not None
    assert same(recorded, [by_hand[1], by_hand[31], by_hand[62]])
    metadata = torch.load(tmp_path / "some" / "metadata.pt")
    assert metadata["sites"] == {f"layer_{n + 1}": f"layers.{n}:output" for n in (0, 30, 61)}
    assert (metadata["layers"], metadata["blocks"]) == (3, 62)
    some = tt.open_layers(tmp_path / "some")
    assert some.numbers == (1, 31, 62)
    assert torch.equal(some[31], by_hand[31])
    assert torch.equal(some[-1], by_hand[62])
    with pytest.raises(LookupError, match="has no layer 30; it has"):
        some[30]
    result = tt.compare(full_model, tmp_path / "some")
    assert {row.site for row in result.rows if row.measures is not None} >= {
        "layer_31:output",
        "layer_62:output",
    }
    assert result.row("layer_31:output").measures.max_abs == 0  # type: ignore[union-attr]
    assert not tt.compare(tmp_path / "some", tmp_path / "some").problems


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        (["layers.30:output"], (31,)),
        (["layers.3*:output"], (4, *range(31, 41))),
        (["layers.30.0:output", "layers.31.0:output"], (31, 32)),
        (["embedding", 61], (0, 62)),
        (["embed_tokens:output", "layers.5:output"], (0, 6)),
        ([-1], (62,)),
    ],
)
def test_selectors_keep_numbers_too(
    model: Decoder,
    inputs: dict[str, Tensor],
    tmp_path: Path,
    layers: list[int | str],
    numbers: tuple[int, ...],
    in_memory: bool,
) -> None:
    with tt.record_layers(model, None if in_memory else tmp_path / "out", layers=layers) as recorder:
        model(**inputs)
    assert recorder.passes[0].layers == numbers


def test_a_block_that_is_not_there_is_an_error(model: Decoder) -> None:
    with pytest.raises(tt.SelectionError, match="layers has 62: this model has 62 blocks, 0 to 61"):
        tt.record_layers(model, layers=[0, 62])


def test_the_order_is_the_embedding_and_then_the_layers(model: Decoder, inputs: dict[str, Tensor]) -> None:
    with tt.record_layers(model):
        model(**inputs)
    layer_hidden_states = tt.get_layer_hidden_states()
    assert layer_hidden_states is not None
    assert len(layer_hidden_states) == 63
    assert torch.equal(layer_hidden_states[0], model.embed_tokens(inputs["input_ids"]))
    assert torch.equal(layer_hidden_states[1], model.layers[0](layer_hidden_states[0]))
    assert torch.equal(layer_hidden_states[62], model.layers[61](layer_hidden_states[61]))


def test_it_is_said_that_the_last_layer_is_before_the_final_norm(
    full_model: Path, model: Decoder, inputs: dict[str, Tensor], show: Callable[..., str]
) -> None:
    assert torch.load(full_model / "metadata.pt")["final_norm"] == "norm"
    assert "the last is before the final norm 'norm'" in " ".join(show(full_model).split())
    assert torch.equal(model.norm(torch.load(full_model / "layer_62_output.pt")), model(**inputs))


def test_hugging_face_has_its_last_state_after_that_norm() -> None:
    transformers = need("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 50, (1, 5))
    with tt.record_layers(model) as recorder, torch.no_grad():
        theirs = model(tokens, output_hidden_states=True).hidden_states
    mine = recorder.hidden_states
    assert same(mine[:-1], list(theirs[:-1]))
    assert torch.equal(model.transformer.ln_f(mine[-1]), theirs[-1])


def test_a_recording_is_not_written_over(full_model: Path, model: Decoder) -> None:
    with pytest.raises(OSError, match="already holds a recording of layers: give another folder"):
        tt.record_layers(model, full_model)
    assert torch.load(full_model / "layer_62_output.pt").shape == (1, 32, 16)
