"""The document on a monitor of a model's intermediate outputs, section by section, with its own snippets.

Where a snippet leaves something open (``...``, a training of one's own) it is filled in; the rest is as written.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.documents.monitoring_000.batches import MONITOR_EPOCHS, MONITOR_LAYERS, run_one_batch
from tests.monitors.training import FFN, SELF_ATTENTION, WEIGHTS
from tests.monitors.training import criterion as loss_of
from torch import Tensor

from torchtap import Monitor, MonitoredTrainer


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

# -- Configuration ------------------------------------------------------------------------------------------

CONFIG_JSON = """
{
  "monitor_layers": {
    "transformer.encoder.layers.0.self_attn": {
      "alias": "attention_weights",
      "record_type": "single"
    },
    "transformer.encoder.layers.0.cross_attn": {
      "alias": "cross_attention",
      "record_type": "epoch_full"
    }
  },
  "monitor_epochs": [1, 5, 10, 20]
}
"""


def test_layers_are_given_as_a_list_or_as_a_dict(training: SimpleNamespace, tmp_path: Path) -> None:
    names = [FFN, SELF_ATTENTION]
    with Monitor(training.model, names, [1], str(tmp_path), [0]) as listed:
        run_one_batch(listed, training)
        assert list(listed.get_single_data()) == names  # no alias: the layer's name; 'single' by default
    options = {
        FFN: {"alias": "a", "record_type": "single"},
        WEIGHTS: {"alias": None, "record_type": "epoch_full"},
    }
    with Monitor(training.model, options, [1], str(tmp_path), [0]) as described:
        run_one_batch(described, training)
        assert list(described.get_single_data()) == ["a"]
        assert list(described.get_epoch_data()) == [WEIGHTS]


def test_the_configuration_is_validated(training: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="epochs_to_record must not be empty"):
        Monitor(training.model, [FFN], [], tmp_path, [0])
    with pytest.raises(ValueError, match="batch_indices must be specified and non-empty"):
        Monitor(training.model, [FFN], [1], tmp_path)
    # 'epoch_full' alone needs no batches
    Monitor(training.model, {FFN: {"record_type": "epoch_full"}}, [1], tmp_path).remove_hooks()


def test_config_json_loads_with_what_it_lacks_given_beside_it(
    training: SimpleNamespace, tmp_path: Path
) -> None:
    Path("config.json").write_text(CONFIG_JSON)
    lacking = (
        r"config.json has no 'monitor_output_dir' and no 'monitor_batch_indices' \(these layers are 'single': "
        r"\['transformer.encoder.layers.0.self_attn'\]\): add to it, or give output_dir=, batch_indices= beside it"
    )
    with pytest.raises(ValueError, match=lacking):
        Monitor.from_config(training.model, "config.json")
    with pytest.raises(ValueError, match=r"has no 'monitor_batch_indices' \("):
        Monitor.from_config(training.model, "config.json", "outputs")
    monitor = Monitor.from_config(training.model, "config.json", output_dir="outputs", batch_indices=[0])
    MonitoredTrainer(monitor).wrap_training_function(encapsulated_train)(config_for(training), "cpu")
    assert Path("outputs/attention_weights/epoch_0001/batch_000000.pt").exists()
    assert Path("outputs/cross_attention/epoch_0001/batch_000003.pt").exists()


def test_a_configuration_is_a_dict_too(training: SimpleNamespace, tmp_path: Path) -> None:
    config = json.loads(CONFIG_JSON)
    with pytest.raises(ValueError, match="the configuration has no 'monitor_output_dir' and no"):
        Monitor.from_config(training.model, config)
    with Monitor.from_config(training.model, config, tmp_path, [0]) as monitor:
        run_one_batch(monitor, training)
        assert list(monitor.get_single_data()) == ["attention_weights"]
    everything_else = {"learning_rate": 0.1, "monitor_output_dir": tmp_path, "monitor_batch_indices": [0]}
    with Monitor.from_config(
        training.model, everything_else, layers_to_monitor=[FFN], epochs_to_record=range(1, 3)
    ) as monitor:
        assert monitor.epochs_to_record == (1, 2)


# -- Usage: a training in a function of its own -------------------------------------------------------------


def encapsulated_train(config: Any, device: str, **kwargs: Any) -> int:
    epoch_callback = kwargs.get("epoch_callback")
    batch_callback = kwargs.get("batch_callback")
    model, dataloader, optimizer = config.training.model, config.training.loader, config.training.optimizer

    for epoch in range(1, config.train.num_epochs + 1):
        if epoch_callback:
            epoch_callback(epoch)

        for batch_idx, batch in enumerate(dataloader):
            if batch_callback:
                batch_callback(batch_idx)

            tokens, targets = batch
            loss = loss_of(model(tokens.to(device)), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        if hasattr(config, "monitor") and config.monitor:
            single_data = config.monitor.get_single_data()
            epoch_data = config.monitor.get_epoch_data()
            config.seen.append((single_data, epoch_data))
            config.monitor.save_single_outputs()
            config.monitor.save_epoch_outputs()
            config.monitor.clear_current_epoch_data()

    if hasattr(config, "monitor") and config.monitor:
        config.monitor.remove_hooks()
    return 42


def config_for(training: SimpleNamespace, monitor: Monitor | None = None) -> SimpleNamespace:
    return SimpleNamespace(train=SimpleNamespace(num_epochs=3), training=training, monitor=monitor, seen=[])


def test_way_1_callbacks(training: SimpleNamespace, monitor: Monitor) -> None:
    config = config_for(training, monitor)
    epoch_callback = monitor.create_epoch_callback()
    batch_callback = monitor.create_batch_callback()
    encapsulated_train(config, "cpu", epoch_callback=epoch_callback, batch_callback=batch_callback)
    assert saved(monitor.output_dir) == EXPECTED
    assert len(config.seen[0][0]["attention_weights"]["data"]) == 2
    assert len(config.seen[0][1]["ffn_epoch_stats"]["data"]) == 4
    assert config.seen[2] == ({}, {})


@pytest.mark.parametrize("knows_the_monitor", [False, True])
def test_way_2_a_wrapper(training: SimpleNamespace, monitor: Monitor, knows_the_monitor: bool) -> None:
    config = config_for(training, monitor if knows_the_monitor else None)
    trainer = MonitoredTrainer(monitor)
    monitored_train = trainer.wrap_training_function(encapsulated_train)
    assert monitored_train(config, "cpu") == 42
    assert saved(monitor.output_dir) == EXPECTED


def test_way_3_where_the_function_is_called(training: SimpleNamespace, monitor: Monitor) -> None:
    batches = list(training.loader)
    num_epochs, num_batches = 3, len(batches)

    def encapsulated_train_one_batch(batch_idx: int) -> None:
        tokens, targets = batches[batch_idx]
        loss_of(training.model(tokens), targets).backward()
        training.optimizer.step()

    for epoch in range(1, num_epochs + 1):
        monitor.set_epoch(epoch)

        for batch_idx in range(num_batches):
            monitor.set_batch_idx(batch_idx)
            encapsulated_train_one_batch(batch_idx)

        single_data = monitor.get_single_data()
        epoch_data = monitor.get_epoch_data()
        if epoch in MONITOR_EPOCHS:
            assert list(single_data["attention_weights"]["data"]) == [(epoch, 0), (epoch, 1)]
            assert len(epoch_data["ffn_epoch_stats"]["data"]) == 4
        monitor.save_single_outputs()
        monitor.save_epoch_outputs()
        monitor.clear_current_epoch_data()

    monitor.remove_hooks()
    assert saved(monitor.output_dir) == EXPECTED


def test_a_training_that_is_no_function_through_epochs_that_are_not_recorded(
    training: SimpleNamespace, tmp_path: Path
) -> None:
    def compute_statistics(all_outputs: Tensor) -> dict[str, Tensor]:
        return {
            "mean": torch.mean(all_outputs, dim=0),
            "std": torch.std(all_outputs, dim=0),
            "min": torch.min(all_outputs, dim=0)[0],
            "max": torch.max(all_outputs, dim=0)[0],
        }

    num_epochs, dataloader = 4, training.loader
    model, criterion, optimizer = training.model, loss_of, training.optimizer
    monitor = Monitor(model, MONITOR_LAYERS, [2, 4], tmp_path / "outputs", [0, 1])
    assert monitor.get_single_data() == {}
    assert monitor.get_epoch_data() == {}

    try:
        for epoch in range(1, num_epochs + 1):
            monitor.set_epoch(epoch)

            for batch_idx, (batch, targets) in enumerate(dataloader):
                monitor.set_batch_idx(batch_idx)

                outputs = model(batch)
                loss = criterion(outputs, targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            single_data = monitor.get_single_data()
            epoch_data = monitor.get_epoch_data()

            for alias, layer_info in single_data.items():
                outputs = list(layer_info["data"].values())
                avg_output = torch.mean(torch.stack(outputs), dim=0)
                torch.save(avg_output, f"custom_avg_{alias}_epoch_{epoch}.pt")

            for alias, layer_info in epoch_data.items():
                outputs = list(layer_info["data"].values())
                all_outputs = torch.cat(outputs, dim=0)
                epoch_stats = compute_statistics(all_outputs)
                torch.save(epoch_stats, f"epoch_stats_{alias}_epoch_{epoch}.pt")

            monitor.save_single_outputs()
            monitor.save_epoch_outputs()

            monitor.clear_current_epoch_data()

    finally:
        monitor.remove_hooks()

    assert [path.name for path in sorted(Path().glob("custom_avg_*"))] == [
        "custom_avg_attention_weights_epoch_2.pt",
        "custom_avg_attention_weights_epoch_4.pt",
    ]
    average = torch.load("custom_avg_attention_weights_epoch_4.pt")
    assert torch.allclose(average.sum(-1), torch.ones(3, 6))
    statistics = torch.load("epoch_stats_ffn_epoch_stats_epoch_4.pt")
    own = torch.load("outputs/ffn_epoch_stats/epoch_0004/statistics.pt")["statistics"]
    for name, expected in statistics.items():
        torch.testing.assert_close(own["over_first_dimension"][name].float(), expected)
