"""The ways a training is monitored in practice, each run whole: in the loop, by callbacks, by a wrapper, afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.monitors.training import (
    CROSS_ATTENTION,
    FFN,
    SELF_ATTENTION,
    VOCABULARY,
    WEIGHTS,
    criterion,
    setting,
)
from torch import Tensor, nn

from torchtap import Monitor, MonitoredTrainer

MONITOR_LAYERS = {
    WEIGHTS: {"alias": "attention_weights", "record_type": "single"},
    FFN: {"alias": "ffn_epoch_stats", "record_type": "epoch_full"},
}
MONITOR_EPOCHS = [1, 2]


@pytest.fixture
def training() -> SimpleNamespace:
    return setting()


@pytest.fixture
def monitor(training: SimpleNamespace, tmp_path: Path) -> Monitor:
    return Monitor(
        model=training.model,
        layers_to_monitor=MONITOR_LAYERS,
        epochs_to_record=MONITOR_EPOCHS,
        output_dir=str(tmp_path / "outputs"),
        batch_indices=[0, 1],
    )


def encapsulated_train(config: Any, device: str, **kwargs: Any) -> int:
    """A training in a function of its own, that knows callbacks and, perhaps, a monitor."""
    epoch_callback = kwargs.get("epoch_callback")
    batch_callback = kwargs.get("batch_callback")
    for epoch in range(1, config.train.num_epochs + 1):
        if epoch_callback:
            epoch_callback(epoch)
        for batch_idx, (tokens, targets) in enumerate(config.training.loader):
            if batch_callback:
                batch_callback(batch_idx)
            loss = criterion(config.training.model(tokens.to(device)), targets)
            config.training.optimizer.zero_grad()
            loss.backward()
            config.training.optimizer.step()
        if getattr(config, "monitor", None):
            single_data = config.monitor.get_single_data()
            epoch_data = config.monitor.get_epoch_data()
            config.seen.append((single_data, epoch_data))
            config.monitor.save_single_outputs()
            config.monitor.save_epoch_outputs()
            config.monitor.clear_current_epoch_data()
    if getattr(config, "monitor", None):
        config.monitor.remove_hooks()
    return 42


def config_for(training: SimpleNamespace, monitor: Monitor | None = None) -> SimpleNamespace:
    return SimpleNamespace(train=SimpleNamespace(num_epochs=3), training=training, monitor=monitor, seen=[])


def saved(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt"))


EXPECTED = sorted(
    name
    for epoch in MONITOR_EPOCHS
    for name in (
        *(f"attention_weights/epoch_{epoch:04}/batch_{batch:06}.pt" for batch in (0, 1)),
        *(f"ffn_epoch_stats/epoch_{epoch:04}/batch_{batch:06}.pt" for batch in range(4)),
        f"ffn_epoch_stats/epoch_{epoch:04}/statistics.pt",
    )
)


def test_callbacks_handed_to_a_function(training: SimpleNamespace, monitor: Monitor) -> None:
    config = config_for(training, monitor)
    epoch_callback = monitor.create_epoch_callback()
    batch_callback = monitor.create_batch_callback()
    encapsulated_train(config, "cpu", epoch_callback=epoch_callback, batch_callback=batch_callback)
    assert saved(monitor.output_dir) == EXPECTED
    assert len(config.seen[0][0]["attention_weights"]["data"]) == 2
    assert len(config.seen[0][1]["ffn_epoch_stats"]["data"]) == 4
    assert not config.seen[2][0]["attention_weights"]["data"]


@pytest.mark.parametrize("knows_the_monitor", [False, True])
def test_a_wrapped_function(training: SimpleNamespace, monitor: Monitor, knows_the_monitor: bool) -> None:
    config = config_for(training, monitor if knows_the_monitor else None)
    trainer = MonitoredTrainer(monitor)
    monitored_train = trainer.wrap_training_function(encapsulated_train)
    assert monitored_train(config, "cpu") == 42
    assert saved(monitor.output_dir) == EXPECTED


def test_a_function_for_one_batch_called_from_a_loop(training: SimpleNamespace, monitor: Monitor) -> None:
    batches = list(training.loader)

    def encapsulated_train_one_batch(batch_idx: int) -> None:
        tokens, targets = batches[batch_idx]
        criterion(training.model(tokens), targets).backward()
        training.optimizer.step()

    for epoch in range(1, 3):
        monitor.set_epoch(epoch)
        for batch_idx in range(len(batches)):
            monitor.set_batch_idx(batch_idx)
            encapsulated_train_one_batch(batch_idx)
        single_data = monitor.get_single_data()
        epoch_data = monitor.get_epoch_data()
        assert list(single_data["attention_weights"]["data"]) == [(epoch, 0), (epoch, 1)]
        assert len(epoch_data["ffn_epoch_stats"]["data"]) == 4
        monitor.save_single_outputs()
        monitor.save_epoch_outputs()
        monitor.clear_current_epoch_data()
    monitor.remove_hooks()
    assert saved(monitor.output_dir) == EXPECTED


def test_in_the_loop_with_processing_of_ones_own(
    training: SimpleNamespace, monitor: Monitor, tmp_path: Path
) -> None:
    def compute_statistics(outputs: Tensor) -> dict[str, Tensor]:
        return {
            "mean": torch.mean(outputs, dim=0),
            "std": torch.std(outputs, dim=0),
            "min": torch.min(outputs, dim=0)[0],
            "max": torch.max(outputs, dim=0)[0],
        }

    try:
        for epoch in range(1, 3):
            monitor.set_epoch(epoch)
            for batch_idx, (tokens, targets) in enumerate(training.loader):
                monitor.set_batch_idx(batch_idx)
                loss = criterion(training.model(tokens), targets)
                training.optimizer.zero_grad()
                loss.backward()
                training.optimizer.step()

            single_data = monitor.get_single_data()
            epoch_data = monitor.get_epoch_data()
            for alias, layer_info in single_data.items():
                outputs = list(layer_info["data"].values())
                avg_output = torch.mean(torch.stack(outputs), dim=0)
                torch.save(avg_output, tmp_path / f"custom_avg_{alias}_epoch_{epoch}.pt")
            for alias, layer_info in epoch_data.items():
                outputs = list(layer_info["data"].values())
                all_outputs = torch.cat(outputs, dim=0)
                torch.save(
                    compute_statistics(all_outputs), tmp_path / f"epoch_stats_{alias}_epoch_{epoch}.pt"
                )

            monitor.save_single_outputs()
            monitor.save_epoch_outputs()
            monitor.clear_current_epoch_data()
    finally:
        monitor.remove_hooks()

    average = torch.load(tmp_path / "custom_avg_attention_weights_epoch_2.pt")
    assert torch.allclose(average.sum(-1), torch.ones(3, 6))
    statistics = torch.load(tmp_path / "epoch_stats_ffn_epoch_stats_epoch_2.pt")
    own = torch.load(monitor.output_dir / "ffn_epoch_stats/epoch_0002/statistics.pt")["statistics"]
    for name, expected in statistics.items():
        torch.testing.assert_close(own["over_first_dimension"][name].float(), expected)


def test_tuple_outputs_are_told_by_their_type(training: SimpleNamespace, tmp_path: Path) -> None:
    monitor = Monitor(training.model, [SELF_ATTENTION, WEIGHTS], [0], tmp_path, batch_indices=[0])
    monitor.set_epoch(0)
    monitor.set_batch_idx(0)
    training.model(torch.zeros(2, 6, dtype=torch.long))
    tuples = 0
    for layer_info in monitor.get_single_data().values():
        for output in layer_info["data"].values():
            if isinstance(output, tuple):
                attn_output, attn_weights = output
                assert (attn_output.shape, attn_weights.shape) == ((2, 6, 16), (2, 6, 6))
                assert isinstance(layer_info["output_shape"][0], list)
                tuples += 1
            else:
                assert layer_info["output_shape"] == [2, 6, 6]
    assert tuples == 1
    monitor.remove_hooks()


def test_attention_is_analysed_by_functions_of_ones_own(training: SimpleNamespace, monitor: Monitor) -> None:
    def process_attention_outputs(outputs: list[Tensor]) -> dict[str, Tensor]:
        weights = torch.stack(outputs)
        return {
            "row_importance": torch.mean(weights, dim=[0, 2]),
            "layer_patterns": torch.mean(weights, dim=1),
        }

    monitor.set_epoch(1)
    for batch_idx, (tokens, _) in enumerate(training.loader):
        monitor.set_batch_idx(batch_idx)
        training.model(tokens)
    for alias, layer_info in monitor.get_single_data().items():
        if "attention" in alias:
            analysis = process_attention_outputs(list(layer_info["data"].values()))
            path = monitor.save_custom_output(analysis, f"attention_analysis_{alias}_epoch_1.pt")
            assert torch.equal(
                torch.load(path, weights_only=True)["layer_patterns"], analysis["layer_patterns"]
            )
    monitor.remove_hooks()


def test_buffers_are_processed_and_saved_under_layer_names(
    training: SimpleNamespace, monitor: Monitor
) -> None:
    monitor.set_epoch(1)
    for batch_idx, (tokens, _) in enumerate(training.loader):
        monitor.set_batch_idx(batch_idx)
        training.model(tokens)
    buffers = monitor.get_epoch_buffers()
    assert list(monitor.get_single_outputs()) == [WEIGHTS]
    for layer, outputs in buffers.items():
        processed = torch.cat(outputs).norm(dim=-1)
        path = monitor.save_custom_output(processed, f"custom_{layer}.pt")
        assert torch.equal(torch.load(path, weights_only=True), processed)
    monitor.clear_epoch_data()
    assert monitor.get_epoch_buffers() == {FFN: []}
    monitor.remove_hooks()


def test_settings_in_the_training_s_own_configuration(training: SimpleNamespace, tmp_path: Path) -> None:
    configuration = {
        "monitor_layers": {
            SELF_ATTENTION: {"alias": "attention_weights", "record_type": "single"},
            CROSS_ATTENTION: {"alias": "cross_attention", "record_type": "epoch_full"},
        },
        "monitor_epochs": [1, 5, 10, 20],
    }
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    monitor = Monitor.from_config(
        training.model, tmp_path / "config.json", output_dir=tmp_path, batch_indices=[0]
    )
    MonitoredTrainer(monitor).wrap_training_function(encapsulated_train)(config_for(training), "cpu")
    assert (tmp_path / "attention_weights/epoch_0001/batch_000000.pt").exists()
    assert (tmp_path / "cross_attention/epoch_0001/batch_000003.pt").exists()


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
