"""Layer by layer: found by structure, recorded pass by pass, in files that anybody can load."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optional import need
from torch import Tensor, nn

import torchtap as tt
from torchtap.monitors.layers import find_layers


class Plain(nn.Module):
    """A model of nobody's library."""

    def __init__(self, width: int = 12, layers: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def hidden(self, tokens: Tensor) -> list[Tensor]:
        """What the recorder has to find, computed by hand."""
        x = self.wte(tokens)
        states = [x]
        for layer in self.layers:
            states.append(layer(x))
            x = x + layer(x)
        return states


@pytest.fixture
def model() -> Plain:
    torch.manual_seed(0)
    return Plain().eval()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))


def gpt2() -> Any:
    transformers = need("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=24, n_head=2, vocab_size=60, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def same(left: list[Tensor] | Any, right: list[Tensor] | Any) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_embedding_and_blocks_are_found_by_structure(model: Plain) -> None:
    names = find_layers(model)
    assert names.embedding == "wte"
    assert names.blocks == ("layers.0", "layers.1", "layers.2", "layers.3")
    assert find_layers(gpt2()).blocks == tuple(f"transformer.h.{n}" for n in range(3))


def test_all_stages_of_a_convolutional_network_are_blocks() -> None:
    def stage() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()) for _ in range(2)))

    network = nn.Sequential()
    network.add_module("stem", nn.Conv2d(3, 4, 1))
    network.add_module("layer1", stage())
    network.add_module("layer2", stage())
    assert find_layers(network).blocks == ("layer1.0", "layer1.1", "layer2.0", "layer2.1")


def test_a_model_without_blocks_says_how_to_name_them() -> None:
    with pytest.raises(tt.SelectionError, match="layers="):
        tt.record_layers(nn.Linear(2, 2))


def test_the_layers_are_those_of_the_forward_and_the_output_is_unchanged(
    model: Plain, tokens: Tensor
) -> None:
    expected = model(tokens)
    with tt.record_layers(model) as recorder, torch.no_grad():
        output = model(tokens)
    assert torch.equal(output, expected)
    assert same(tt.get_layer_hidden_states(), model.hidden(tokens))
    assert same(recorder.hidden_states, model.hidden(tokens))


def test_hugging_face_hidden_states_are_matched(tokens: Tensor) -> None:
    model = gpt2()
    with tt.record_layers(model), torch.no_grad():
        theirs = model(tokens, output_hidden_states=True).hidden_states
    mine = tt.get_layer_hidden_states()
    assert mine is not None
    assert len(mine) == len(theirs)
    assert same(mine[:-1], theirs[:-1])  # their last one has gone through the final norm


@pytest.mark.parametrize("form", ["compile", "trace", "script", "export"])
def test_other_forms_of_the_model_give_the_same_layers(form: str, model: Plain, tokens: Tensor) -> None:
    changed: Any = {
        "compile": lambda: torch.compile(model, backend="aot_eager"),
        "trace": lambda: torch.jit.trace(model, (tokens,), check_trace=False),
        "script": lambda: torch.jit.script(model),
        "export": lambda: torch.export.export(model, (tokens,)).module(),
    }[form]()
    with tt.record_layers(changed) as recorder, torch.no_grad():
        changed(tokens)
        changed(tokens)
    assert len(recorder.passes) == 2
    found = tt.get_layer_hidden_states()
    assert found is not None
    for mine, expected in zip(found, model.hidden(tokens), strict=True):
        torch.testing.assert_close(mine, expected)
    with torch.no_grad():
        torch.testing.assert_close(changed(tokens), model(tokens))
    assert len(recorder.passes) == 2


def test_one_option_switches_it_off_and_on(model: Plain, tokens: Tensor) -> None:
    recorder = tt.record_layers(model, enabled=False)
    model(tokens)
    assert recorder.passes == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    recorder.enable()
    model(tokens)
    assert len(recorder.passes) == 1
    recorder.disable()
    model(tokens)
    assert len(recorder.passes) == 1
    recorder.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(tt.SessionError):
        recorder.enable()


def test_selectors_choose_the_layers(model: Plain, tokens: Tensor) -> None:
    with tt.record_layers(model, layers=["layers.0:output", "layers.3:output"]):
        model(tokens)
    hidden = model.hidden(tokens)
    assert same(tt.get_layer_hidden_states(), [hidden[1], hidden[4]])


def test_each_thread_sees_its_own_pass(model: Plain) -> None:
    found: dict[int, bool] = {}
    batches = [torch.full((1, 3), n) for n in range(4)]

    def work(n: int) -> None:
        with torch.no_grad():
            for _ in range(3):
                model(batches[n])
        found[n] = same(tt.get_layer_hidden_states(), model.hidden(batches[n]))

    with tt.record_layers(model):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == dict.fromkeys(range(4), True)


def test_a_forward_that_raises_does_not_stop_the_next(model: Plain, tokens: Tensor) -> None:
    with tt.record_layers(model) as recorder:
        with pytest.raises(IndexError):
            model(tokens + 1000)
        model(tokens)
        assert same(recorder.hidden_states, model.hidden(tokens))


def test_the_files_have_the_documented_layout_and_load_safely(
    model: Plain, tokens: Tensor, tmp_path: Path
) -> None:
    with tt.record_layers(model, out_dir=tmp_path / "out"):
        model(tokens)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        "embedding_output.pt", "layer_1_output.pt", "layer_2_output.pt", "layer_3_output.pt", "layer_4_output.pt",
        "statistics.pt", "metadata.pt", "run",
    }  # fmt: skip
    hidden = model.hidden(tokens)
    assert torch.equal(torch.load(tmp_path / "out" / "embedding_output.pt", weights_only=True), hidden[0])
    assert torch.equal(torch.load(tmp_path / "out" / "layer_3_output.pt", weights_only=True), hidden[3])
    stats = torch.load(tmp_path / "out" / "statistics.pt", weights_only=True)
    assert sorted(stats) == [f"layer_{n}" for n in range(5)]
    assert stats["layer_2"]["has_nan"] is False
    assert torch.load(tmp_path / "out" / "metadata.pt", weights_only=True)["layers"] == 4
    run = tt.open(tmp_path / "out" / "run")
    assert torch.equal(run.tensor("layers.2:output", 0), hidden[3])


def test_prefill_and_decode_steps_are_told_apart(tmp_path: Path) -> None:
    model = gpt2()
    prompt = torch.randint(1, 60, (1, 6), generator=torch.Generator().manual_seed(0))
    with tt.record_layers(model, out_dir=tmp_path / "out") as recorder:
        model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    assert [(p.phase, p.tokens) for p in recorder.passes] == [("prefill", 6)] + [("decode", 1)] * 3
    assert torch.load(tmp_path / "out" / "layer_1_output.pt", weights_only=True).shape == (1, 6, 24)
    last = tmp_path / "out" / "decode_0003"
    assert torch.load(last / "layer_3_output.pt", weights_only=True).shape == (1, 1, 24)
    assert torch.load(last / "metadata.pt", weights_only=True)["cached_tokens"] == 8
    again = tt.compare(tmp_path / "out", tmp_path / "out")
    assert again.steps == (0, 1, 2, 3)


def test_only_the_last_pass_stays_in_memory(model: Plain, tokens: Tensor, tmp_path: Path) -> None:
    with tt.record_layers(model, out_dir=tmp_path / "out") as recorder:
        for n in range(5):
            model(tokens[:, : n + 1])
    assert [p.folder.name for p in recorder.passes if p.folder] == [
        "out",
        *(f"pass_{n:04d}" for n in range(1, 5)),
    ]
    assert recorder.hidden_states[0].shape[1] == 5


# What a person would write by hand to analyse such a folder, and the one line that says the same.


@pytest.fixture
def two_folders(model: Plain, tokens: Tensor, tmp_path: Path) -> tuple[Path, Path]:
    with tt.record_layers(model, out_dir=tmp_path / "one"):
        model(tokens)
    with torch.no_grad():
        model.layers[2][0].weight += 0.01 * torch.randn(12, 12)  # type: ignore[index, operator]
    with tt.record_layers(model, out_dir=tmp_path / "two"):
        model(tokens)
    return tmp_path / "one", tmp_path / "two"


def test_statistics_of_every_layer_in_one_line(two_folders: tuple[Path, Path]) -> None:
    layer = torch.load(two_folders[0] / "layer_3_output.pt", weights_only=True)
    found = tt.open_layers(two_folders[0]).statistics["layer_3"]
    assert found["mean"] == pytest.approx(layer.float().mean().item())
    assert found["std"] == pytest.approx(layer.float().std().item())
    assert found["has_nan"] == bool(torch.isnan(layer).any())
    assert found["has_inf"] == bool(torch.isinf(layer).any())


def test_one_layer_in_one_line(two_folders: tuple[Path, Path]) -> None:
    layers = tt.open_layers(two_folders[0])
    assert torch.equal(layers[3], torch.load(two_folders[0] / "layer_3_output.pt", weights_only=True))
    assert len(layers) == 5
    assert torch.equal(layers[-1], layers[4])
    assert len(layers[1:3]) == 2
    with pytest.raises((IndexError, LookupError)):
        layers[9]


def test_adjacent_layers_in_one_line(two_folders: tuple[Path, Path]) -> None:
    before = torch.load(two_folders[0] / "layer_2_output.pt", weights_only=True)
    after = torch.load(two_folders[0] / "layer_3_output.pt", weights_only=True)
    difference = (after - before).abs()
    change = tt.layer_changes(two_folders[0])[2]
    assert (change.before, change.after) == ("layer_2:output", "layer_3:output")
    assert change.measures is not None
    assert change.measures.max_abs == pytest.approx(difference.max().item())
    assert change.measures.mean_abs == pytest.approx(difference.mean().item())
    assert change.relative == pytest.approx((difference.norm() / before.norm()).item())


def test_two_versions_of_a_layer_in_one_line(two_folders: tuple[Path, Path]) -> None:
    mine = torch.load(two_folders[1] / "layer_3_output.pt", weights_only=True)
    reference = torch.load(two_folders[0] / "layer_3_output.pt", weights_only=True)
    difference = (mine - reference).abs()
    relative = difference / (reference.abs() + 1e-8)
    result = tt.compare(*two_folders)
    measures = result.row("layer_3:output").measures
    assert measures is not None
    assert measures.max_abs == pytest.approx(difference.max().item(), rel=1e-5)
    assert measures.mean_abs == pytest.approx(difference.mean().item(), rel=1e-5)
    assert measures.max_rel == pytest.approx(relative.max().item(), rel=1e-4)
    assert measures.mean_rel == pytest.approx(relative.mean().item(), rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(mine.flatten(), reference.flatten(), dim=0)
    assert measures.cosine == pytest.approx(cosine.item(), abs=1e-6)
    assert result.first is not None
    assert result.first.site == "layer_3:output"
