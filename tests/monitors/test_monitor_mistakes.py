"""`Monitor` asked for the wrong thing: what it says, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchtap import Monitor


def make(
    tmp_path: Path, layers: Any = ("fc",), epochs: Any = (1,), batches: Any = (0,), **options: Any
) -> Monitor:
    model = nn.Module()
    model.fc, model.blocks = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])
    return Monitor(model, layers, epochs, options.pop("output_dir", tmp_path), batches, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"layers": ["fc", "fd"]},
            r"The following layers specified in 'layers_to_monitor' do not exist in the model: \['fd'\]. "
            r"Did you mean 'fc'\? Available layers: \['fc', 'blocks', 'blocks.0'\]",
        ),
        (
            {"layers": {"fc": {"alias": "a"}, "blocks.0": {"alias": "a"}}},
            r"^Duplicate alias 'a' in layers_to_monitor\.$",
        ),
        ({"layers": {"fc": {"alias": "blocks.0"}, "blocks.0": None}}, r"Duplicate alias 'blocks.0'"),
        ({"layers": []}, "layers_to_monitor is empty"),
        ({"layers": "fc"}, "layers_to_monitor is 'fc': give a list of layer names"),
        ({"layers": {"fc": {"alias": "a/b"}}}, "alias 'a/b' of layer 'fc' cannot name a folder"),
        ({"layers": {"fc": {"record_type": "all"}}}, "record_type 'all' of layer 'fc': it is 'single'"),
        ({"layers": {"fc": {"aliass": "x"}}}, r"layers_to_monitor\['fc'\] has \['aliass'\]"),
        ({"epochs": []}, "epochs_to_record must not be empty"),
        ({"epochs": [1, -2]}, "epochs_to_record has -2: it lists whole numbers from 0 on"),
        ({"epochs": 3}, "epochs_to_record is 3: give a list of whole numbers"),
        ({"batches": None}, r"batch_indices must be specified and non-empty .* 'single'; these do: \['fc'\]"),
        ({"batches": []}, "batch_indices must be specified and non-empty"),
        ({"format": "h5"}, "format 'h5': outputs are saved as 'pt', 'npz', 'safetensors'"),
        ({"memory_ceiling": -1}, "memory_ceiling has -1"),
    ],
)
def test_a_bad_setting_is_a_value_error_that_names_it(tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **arguments)


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"output_dir '.*file/inside' cannot be written to \(Not a directory\)"):
        make(tmp_path, output_dir=tmp_path / "file" / "inside")


def test_a_clock_used_wrongly_says_how_to_use_it(tmp_path: Path) -> None:
    monitor = make(tmp_path)
    with pytest.raises(RuntimeError, match=r"set_batch_idx\(0\) before set_epoch: first set the epoch"):
        monitor.set_batch_idx(0)
    with pytest.raises(ValueError, match=r"set_epoch\(-1\): an epoch is a whole number from 0 on"):
        monitor.set_epoch(-1)
    monitor.set_epoch(1)
    with pytest.raises(ValueError, match=r"set_batch_idx\('0'\): a batch index is a whole number"):
        monitor.set_batch_idx("0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layers \['x'\] are not monitored; these are: \['fc'\]"):
        monitor.get_single_data(["x"])
    monitor.remove_hooks()
    monitor.remove_hooks()
    with pytest.raises(RuntimeError, match="hooks were removed; make a new Monitor"):
        monitor.set_epoch(2)


def test_a_container_that_is_never_called_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"'blocks' is a ModuleList: a container .* 'blocks.0' … instead"):
        make(tmp_path, layers=["blocks"]).remove_hooks()


def test_a_layer_that_is_never_called_is_warned_of_when_its_epoch_is_over(tmp_path: Path) -> None:
    from tests.models import Thrice

    model = Thrice()
    monitor = Monitor(model, ["never", "shared"], [1], tmp_path, [0])
    monitor.set_epoch(1)
    monitor.set_batch_idx(0)
    expected = model(torch.randn(2, 5))
    with pytest.warns(RuntimeWarning) as caught:
        monitor.set_epoch(2)
        monitor.remove_hooks()
    texts = [str(warning.message) for warning in caught]
    assert "nothing was recorded for layer 'never': module not called" in texts
    assert "layer 'shared' is called 3 times in a pass; the last call's output is kept" in texts
    assert expected.shape == (2, 5)
