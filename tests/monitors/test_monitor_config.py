"""A monitor's settings from a configuration file in any of three formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitors.training import CROSS_ATTENTION, SELF_ATTENTION, Transformer

from torchtap import Monitor

SETTINGS: dict[str, Any] = {
    "learning_rate": 0.1,
    "monitor_layers": {
        SELF_ATTENTION: {"alias": "attention_weights", "record_type": "single"},
        CROSS_ATTENTION: {"alias": "cross_attention", "record_type": "epoch_full"},
    },
    "monitor_epochs": [1, 5, 10, 20],
    "monitor_batch_indices": [0],
    "monitor_format": "safetensors",
}
YAML = f"""
learning_rate: 0.1
monitor_layers:
  {SELF_ATTENTION}: {{alias: attention_weights, record_type: single}}
  {CROSS_ATTENTION}:
    alias: cross_attention
    record_type: epoch_full
monitor_epochs: [1, 5, 10, 20]
monitor_batch_indices: [0]
monitor_format: safetensors
"""
TOML = f"""
learning_rate = 0.1
monitor_epochs = [1, 5, 10, 20]
monitor_batch_indices = [0]
monitor_format = "safetensors"
[monitor_layers]
"{SELF_ATTENTION}" = {{alias = "attention_weights", record_type = "single"}}
"{CROSS_ATTENTION}" = {{alias = "cross_attention", record_type = "epoch_full"}}
"""


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", json.dumps(SETTINGS)), ("config.yaml", YAML), ("config.toml", TOML)]
)
def test_every_format_makes_the_same_monitor(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    model = Transformer()
    with Monitor.from_config(model, tmp_path / name, tmp_path / "out") as monitor:
        assert monitor.epochs_to_record == (1, 5, 10, 20)
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        model(torch.zeros(2, 6, dtype=torch.long))
        assert list(monitor.get_single_data()) == ["attention_weights"]
        assert list(monitor.get_epoch_data()) == ["cross_attention"]
        assert monitor.save_single_outputs()[0].suffix == ".safetensors"


def test_arguments_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SETTINGS, "monitor_output_dir": str(tmp_path / "in_file")}))
    monitor = Monitor.from_config(Transformer(), path, batch_indices=[7], format="npz")
    assert monitor.output_dir == tmp_path / "in_file"
    assert monitor.batch_indices == (7,)
    assert monitor.format == "npz"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"monitor_epochs": [1]}', "has no 'monitor_layers'"),
        ("a.json", '{"monitor_layer": ["x"]}', "has 'monitor_layer'; did you mean 'monitor_layers'"),
        (
            "a.json",
            '{"monitor_layers": ["x"], "monitor_epochs": 3}',
            "'monitor_epochs' is 3; it has to be a list",
        ),
        ("a.json", "[1]", "is a list: it has to be a table"),
        ("a.json", "{", "does not fit its suffix"),
        ("a.toml", "= 3", "does not fit its suffix"),
        ("a.yaml", "a: [", "does not fit its suffix"),
        ("a.ini", "", r"ends in '.ini'; known are .json, .yaml, .toml"),
        ("missing.json", None, "cannot be read: No such file"),
        (
            "a.json",
            json.dumps(SETTINGS),
            "has no 'monitor_output_dir': add to it, or give output_dir= beside it",
        ),
    ],
)
def test_a_bad_configuration_says_what_is_wrong_with_it(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        Monitor.from_config(Transformer(), tmp_path / name)
