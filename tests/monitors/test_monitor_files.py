"""What `Monitor` writes: the documented entries in each format, statistics, spilled outputs, one's own results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitors.training import MIXED, setting, train
from torch import Tensor, nn

from torchtap import Monitor


@pytest.mark.parametrize("file_format", ["pt", "npz", "safetensors"])
def test_saved_files_hold_the_documented_entries(tmp_path: Path, file_format: str) -> None:
    training = setting()
    monitor = Monitor(training.model, MIXED, [1], tmp_path, [1], format=file_format)
    for _ in train(training, 1, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
        data = monitor.get_single_data() | monitor.get_epoch_data()
        paths = monitor.save_single_outputs() + monitor.save_epoch_outputs()
        monitor.clear_current_epoch_data()
    monitor.remove_hooks()
    assert tmp_path / f"ffn/epoch_0001/batch_000003.{file_format}" in paths
    items = [Monitor.load_outputs(path) for path in paths if path.stem != "statistics"]
    assert len(items) == 6
    for item in items:
        assert list(item) == ["epoch", "batch_idx", "layer", "alias", "output_shape", "output"]
        kept = data[item["alias"]]
        assert item["layer"] == kept["layer"]
        assert item["output_shape"] == kept["output_shape"]
        expected = kept["data"][item["epoch"], item["batch_idx"]]
        assert type(item["output"]) is type(expected)
        for got, wanted in zip(_tensors(item["output"]), _tensors(expected), strict=True):
            assert torch.equal(got, wanted)


def test_pt_files_load_with_weights_only_and_npz_without_torch_or_pickle(tmp_path: Path) -> None:
    import numpy as np

    model = nn.Sequential(nn.Linear(3, 2))
    for file_format in ("pt", "npz"):
        with Monitor(model, ["0"], [0], tmp_path, [0], format=file_format) as monitor:
            monitor.set_epoch(0)
            monitor.set_batch_idx(0)
            expected = model(torch.ones(1, 3)).detach()
            (path,) = monitor.save_single_outputs()
        if file_format == "pt":
            assert torch.equal(torch.load(path, weights_only=True)["output"], expected)
        else:
            assert np.array_equal(np.load(path, allow_pickle=False)["output"], expected.numpy())


def test_epoch_full_saves_the_statistics_of_the_concatenation(tmp_path: Path) -> None:
    training = setting()
    monitor = Monitor(training.model, MIXED, [2], tmp_path, [0])
    for epoch in train(training, 2, epoch_callback=monitor.set_epoch, batch_callback=monitor.set_batch_idx):
        if epoch == 2:
            whole = torch.cat(list(monitor.get_epoch_data()["ffn"]["data"].values())).double()
            saved = torch.load(monitor.save_epoch_outputs()[-1], weights_only=True)
    monitor.remove_hooks()
    assert saved["output_shape"] == list(whole.shape)
    assert saved["batches"] == [0, 1, 2, 3]
    numbers = saved["statistics"]
    assert numbers["count"] == whole.numel()
    for name in ("mean", "std", "min", "max"):
        assert numbers[name] == pytest.approx(float(getattr(whole, name)()), rel=1e-9)
    over = numbers["over_first_dimension"]
    torch.testing.assert_close(over["mean"], whole.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(over["std"], whole.std(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(over["min"].double(), whole.amin(0))
    assert torch.equal(over["max"].double(), whole.amax(0))


def test_beyond_the_ceiling_outputs_go_to_disk_and_nothing_is_lost(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity())
    ceiling = 64 * 4000 * 4 // 4
    monitor = Monitor(
        model, {"0": {"record_type": "epoch_full"}}, [1], tmp_path, memory_ceiling=ceiling, asynchronous=True
    )
    monitor.set_epoch(1)
    torch.manual_seed(0)
    values = [torch.randn(64, 1000) * 10 ** (index % 5) for index in range(12)]
    for index, value in enumerate(values):
        monitor.set_batch_idx(index)
        model(value)
    data = monitor.get_epoch_data()["0"]["data"]
    assert all(torch.equal(data[1, index], value) for index, value in enumerate(values))
    spilled = list(tmp_path.glob(".spilled-*/0/*/*.pt"))
    assert len(spilled) >= 12 - 1 - ceiling // (64 * 4000)
    data[1, 11].zero_()
    assert torch.equal(monitor.get_epoch_data()["0"]["data"][1, 11], values[11])
    del data
    paths = monitor.save_epoch_outputs()
    monitor.clear_current_epoch_data()
    monitor.remove_hooks()
    assert not list(tmp_path.glob(".spilled-*"))
    assert all(
        torch.equal(torch.load(p, weights_only=True)["output"], v)
        for p, v in zip(paths, values, strict=False)
    )
    whole = torch.cat(values).double()
    statistics = torch.load(paths[-1], weights_only=True)["statistics"]
    assert statistics["mean"] == pytest.approx(float(whole.mean()), rel=1e-9)
    assert statistics["std"] == pytest.approx(float(whole.std()), rel=1e-9)


def test_results_of_ones_own_are_saved_beside(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    with Monitor(model, ["0"], [0], tmp_path, [0]) as monitor:
        tensor = torch.arange(3.0)
        assert torch.equal(torch.load(monitor.save_custom_output(tensor, "a.pt"), weights_only=True), tensor)
        path = monitor.save_custom_output({"x": tensor, "n": 3, "names": ["a"]}, "deep/er.safetensors")
        assert torch.equal(Monitor.load_outputs(path)["x"], tensor)
        assert Monitor.load_outputs(path)["names"] == ["a"]
        assert monitor.save_custom_output(tensor, "custom_blocks.0").name == "custom_blocks.0.pt"
        with pytest.raises(ValueError, match=r"'../out.pt' leads out of"):
            monitor.save_custom_output(tensor, "../out.pt")
        with pytest.raises(ValueError, match="a Linear cannot be saved: give tensors"):
            monitor.save_custom_output({"model": model[0]}, "model.pt")


def test_a_disk_that_fails_costs_the_file_and_not_the_training(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    monitor = Monitor(model, ["0"], [0], tmp_path / "out", [0])
    monitor.set_epoch(0)
    monitor.set_batch_idx(0)
    model(torch.randn(1, 3))
    (tmp_path / "out" / "0").write_text("in the way of a folder")
    with pytest.warns(RuntimeWarning, match="could not save an output and goes on: OutputError"):
        monitor.save_single_outputs()
    assert len(monitor.lost) == 1
    monitor.remove_hooks()


def test_files_are_written_even_if_a_script_ends_without_waiting(tmp_path: Path) -> None:
    program = f"""
import torch
from torchtap import Monitor
model = torch.nn.Sequential(torch.nn.Identity())
monitor = Monitor(model, ["0"], [0], {str(tmp_path)!r}, [0], asynchronous=True)
monitor.set_epoch(0)
monitor.set_batch_idx(0)
model(torch.zeros(4 << 20))
monitor.save_single_outputs()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert torch.load(tmp_path / "0/epoch_0000/batch_000000.pt")["output"].numel() == 4 << 20


def _tensors(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [tensor for tensor in tree if tensor is not None]
