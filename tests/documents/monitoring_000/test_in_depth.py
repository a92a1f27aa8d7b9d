"""The same document: advanced use, common problems, extending it, API."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.documents.monitoring_000.batches import MONITOR_LAYERS, run_one_batch
from tests.monitors.training import FFN, SELF_ATTENTION, VOCABULARY, WEIGHTS
from torch import Tensor, nn

from torchtap import Monitor

# -- Advanced use -------------------------------------------------------------------------------------------


def test_tuple_outputs(training: SimpleNamespace, tmp_path: Path) -> None:
    monitor = Monitor(training.model, [SELF_ATTENTION, WEIGHTS], [1], tmp_path, batch_indices=[0])
    run_one_batch(monitor, training)
    tuples = 0
    single_data = monitor.get_single_data()
    for layer_info in single_data.values():
        outputs = list(layer_info["data"].values())
        for output in outputs:
            if isinstance(output, tuple):
                attn_output, attn_weights = output
                assert (attn_output.shape, attn_weights.shape) == ((3, 6, 16), (3, 6, 6))
                assert isinstance(layer_info["output_shape"][0], list)
                tuples += 1
            else:
                assert layer_info["output_shape"] == [3, 6, 6]
    assert tuples == 1
    monitor.remove_hooks()


def test_example_1_attention_weights(training: SimpleNamespace, monitor: Monitor) -> None:
    plotted: list[Tensor] = []
    plot_attention_patterns = plotted.append
    for epoch in train_one_epoch(training, monitor):
        single_data = monitor.get_single_data()
        for alias, layer_info in single_data.items():
            if "attention" in alias:
                outputs = list(layer_info["data"].values())
                attention_weights = outputs
                avg_attention = torch.mean(torch.stack(attention_weights), dim=0)
                plot_attention_patterns(avg_attention)
                torch.save(avg_attention, f"attention_analysis_epoch_{epoch}.pt")
    assert torch.equal(torch.load("attention_analysis_epoch_1.pt"), plotted[0])


def train_one_epoch(training: SimpleNamespace, monitor: Monitor) -> list[int]:
    monitor.set_epoch(1)
    for batch_idx, (tokens, _) in enumerate(training.loader):
        monitor.set_batch_idx(batch_idx)
        training.model(tokens)
    return [1]


def test_example_2_statistics_of_a_feed_forward_layer(training: SimpleNamespace, monitor: Monitor) -> None:
    for epoch in train_one_epoch(training, monitor):
        epoch_data = monitor.get_epoch_data()
        for alias, layer_info in epoch_data.items():
            if "ffn" in alias:
                outputs = list(layer_info["data"].values())
                all_outputs = torch.cat(outputs, dim=0)
                stats = {
                    "mean": torch.mean(all_outputs, dim=0),
                    "std": torch.std(all_outputs, dim=0),
                    "min": torch.min(all_outputs, dim=0)[0],
                    "max": torch.max(all_outputs, dim=0)[0],
                }
                torch.save(stats, f"ffn_stats_epoch_{epoch}.pt")
    assert torch.load("ffn_stats_epoch_1.pt")["mean"].shape == (6, 16)


def test_example_3_a_function_of_ones_own(training: SimpleNamespace, monitor: Monitor) -> None:
    def process_attention_outputs(outputs: list[Tensor]) -> dict[str, Tensor]:
        weights = torch.stack(outputs)
        head_importance = torch.mean(weights, dim=[0, 2])
        layer_patterns = torch.mean(weights, dim=1)
        return {"head_importance": head_importance, "layer_patterns": layer_patterns}

    for epoch in train_one_epoch(training, monitor):
        single_data = monitor.get_single_data()
        for alias, layer_info in single_data.items():
            if "attention" in alias:
                outputs = list(layer_info["data"].values())
                analysis = process_attention_outputs(outputs)
                torch.save(analysis, f"attention_analysis_{alias}_epoch_{epoch}.pt")
    assert torch.load("attention_analysis_attention_weights_epoch_1.pt")["layer_patterns"].shape == (2, 6, 6)


# -- Common problems ----------------------------------------------------------------------------------------


def test_a_wrong_layer_name_lists_the_layers_there_are(training: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"^The following layers specified in 'layers_to_monitor' do not exist in the model: \['fnn'\].*"
        r"Available layers: .*'transformer.encoder.layers.0.ffn'",
    ):
        Monitor(training.model, ["fnn"], [1], tmp_path, [0])


def test_a_repeated_alias_is_an_error(training: SimpleNamespace, tmp_path: Path) -> None:
    twice = {FFN: {"alias": "xxx"}, WEIGHTS: {"alias": "xxx"}}
    with pytest.raises(ValueError, match=r"^Duplicate alias 'xxx' in layers_to_monitor\.$"):
        Monitor(training.model, twice, [1], tmp_path, [0])


def test_a_forgotten_epoch_or_batch_is_told(training: SimpleNamespace, monitor: Monitor) -> None:
    tokens, _ = next(iter(training.loader))
    with pytest.warns(RuntimeWarning, match="nothing was recorded: set_epoch was not called"):
        training.model(tokens)
    monitor.set_epoch(1)
    with pytest.warns(RuntimeWarning, match="nothing was recorded: set_batch_idx was not called in epoch 1"):
        training.model(tokens)
    training.model.eval()
    monitor.set_epoch(2)
    training.model(tokens)  # perhaps an evaluation before the first batch
    with pytest.warns(RuntimeWarning, match="set_batch_idx was not called in epoch 2"):
        assert monitor.get_single_data() == {}
    monitor.remove_hooks()


@pytest.mark.filterwarnings("error")
def test_a_look_at_the_model_before_the_training_is_not_told(
    training: SimpleNamespace, monitor: Monitor
) -> None:
    tokens, _ = next(iter(training.loader))
    training.model.eval()
    training.model(tokens)
    training.model.train()
    assert list(train_one_epoch(training, monitor)) == [1]
    monitor.set_epoch(7)  # which is not recorded
    training.model(tokens)
    monitor.remove_hooks()
    assert not training.model._forward_pre_hooks


# -- Extending it -------------------------------------------------------------------------------------------


def test_a_filter_in_a_hook_of_ones_own(training: SimpleNamespace, tmp_path: Path) -> None:
    class Filtering(Monitor):
        def _hook_fn(self, layer_name: str) -> Any:
            keep = super()._hook_fn(layer_name)

            def hook(module: nn.Module, input: Any, output: Any) -> None:
                calls.append((layer_name, type(module).__name__, len(input)))
                if self.current_epoch in self.epochs_to_record and self._custom_condition(output):
                    keep(module, input, output)

            return hook

        def _custom_condition(self, output: Any) -> bool:
            return self.current_batch_idx != 1

    calls: list[tuple[str, str, int]] = []
    monitor = Filtering(training.model, MONITOR_LAYERS, [1], tmp_path, [0, 1, 2])
    expected: list[Tensor] = []
    handle = training.model.get_submodule(FFN).register_forward_hook(lambda *a: expected.append(a[2]))
    train_one_epoch(training, monitor)
    handle.remove()
    assert len(calls) == 2 * 4
    assert (FFN, "Sequential", 1) in calls
    assert list(monitor.get_single_data()["attention_weights"]["data"]) == [(1, 0), (1, 2)]
    kept = monitor.get_epoch_data()["ffn_epoch_stats"]["data"]
    assert list(kept) == [(1, 0), (1, 2), (1, 3)]
    assert all(torch.equal(kept[1, index], expected[index]) for index in (0, 2, 3))
    assert len(monitor.save_epoch_outputs()) == 4
    monitor.remove_hooks()
    assert not any(module._forward_hooks for module in training.model.modules())


def test_a_hook_of_ones_own_is_refused_where_it_would_not_run(
    training: SimpleNamespace, tmp_path: Path
) -> None:
    class Printing(Monitor):
        def _hook_fn(self, layer_name: str) -> Any:
            return lambda *_: print(layer_name)

    compiled = torch.compile(training.model, backend="eager")
    with pytest.raises(ValueError, match="a _hook_fn of its own, and the model is compiled"):
        Printing(compiled, [FFN], [1], tmp_path, [0])


def test_buffers_are_processed_as_one_likes(training: SimpleNamespace, monitor: Monitor) -> None:
    def my_custom_function(outputs: list[Tensor]) -> Tensor:
        return torch.cat(outputs).norm(dim=-1)

    train_one_epoch(training, monitor)
    assert list(monitor.get_single_outputs()) == [WEIGHTS]
    buffers = monitor.get_epoch_buffers()
    for layer, outputs in buffers.items():
        processed = my_custom_function(outputs)
        path = monitor.save_custom_output(processed, f"custom_{layer}.pt")
        assert torch.equal(torch.load(path, weights_only=True), processed)
    monitor.clear_epoch_data()
    assert monitor.get_epoch_buffers() == {}
    assert monitor.get_single_data()
    monitor.remove_hooks()


# -- API reference ------------------------------------------------------------------------------------------


def test_the_data_is_there_as_attributes_too(training: SimpleNamespace, monitor: Monitor) -> None:
    assert dict(monitor.single_data) == dict(monitor.epoch_data) == {}
    train_one_epoch(training, monitor)
    copies = monitor.get_single_data()
    assert set(copies["attention_weights"]) == {"layer", "alias", "output_shape", "data"}
    shown = monitor.single_data["attention_weights"]
    assert {key: value for key, value in shown.items() if key != "data"} == {
        "layer": WEIGHTS,
        "alias": "attention_weights",
        "output_shape": [3, 6, 6],
    }
    copies["attention_weights"]["data"][1, 0].zero_()
    assert shown["data"][1, 0].any()
    assert list(monitor.epoch_data["ffn_epoch_stats"]["data"]) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    with pytest.raises(TypeError):  # what was put in would be lost
        shown["data"][1, 5] = torch.zeros(1)  # type: ignore[index]
    monitor.remove_hooks()


def test_a_saved_item_has_what_the_document_lists(training: SimpleNamespace, monitor: Monitor) -> None:
    tokens = run_one_batch(monitor, training)
    (path,) = monitor.save_single_outputs()
    item = torch.load(path, weights_only=True)
    output = item.pop("output")
    assert item == {
        "epoch": 1,
        "batch_idx": 0,
        "layer": WEIGHTS,
        "alias": "attention_weights",
        "output_shape": [len(tokens), 6, 6],
    }
    assert output.device.type == "cpu"
    assert not output.requires_grad
    monitor.remove_hooks()


def test_layer_names_are_those_of_named_modules_also_of_a_compiled_model(
    training: SimpleNamespace, tmp_path: Path
) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 6))
    expected: list[Tensor] = []
    layer = training.model.get_submodule(FFN)
    handle = layer.register_forward_hook(lambda *arguments: expected.append(arguments[2]))
    training.model(tokens)
    handle.remove()
    compiled = torch.compile(training.model, backend="eager")
    compiled(tokens)
    (name,) = [name for name, module in compiled.named_modules() if module is layer]
    with Monitor(compiled, {name: {"alias": "ffn"}}, [0], tmp_path, [0]) as monitor:
        monitor.set_epoch(0)
        monitor.set_batch_idx(0)
        compiled(tokens)
        found = monitor.get_single_data()["ffn"]["data"][0, 0]
    torch.testing.assert_close(found, expected[0])
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_monitored_too(tmp_path: Path) -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    x = torch.randn(4, 3)
    with Monitor(model, ["0"], [0], tmp_path, [0]) as monitor:
        monitor.set_epoch(0)
        monitor.set_batch_idx(0)
        model(x)
        found = monitor.get_single_data()["0"]["data"][0, 0]
    torch.testing.assert_close(found.relu(), model(x))
