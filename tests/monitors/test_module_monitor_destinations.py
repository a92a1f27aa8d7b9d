"""Where the numbers go: storage, files, run folders, sinks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import Tagger, mlp
from tests.monitors.module_monitoring import hooks_on, watching
from tests.optional import need

import torchtap as tt
from torchtap import StorageManager
from torchtap.monitors.metric_storage import key_of, site_of


def test_memory_does_not_grow_with_steps_when_a_run_is_given(tmp_path: Path) -> None:
    model = Tagger()
    monitor = watching(model, run=tmp_path / "run")
    monitor.add_parameter_metric("norm", lambda p: p.norm())
    means = []
    for step in range(4):
        x = torch.randn(2, 3, 8)
        monitor.begin_step(step)
        means.append(model(x).mean().item())
        monitor.monitor_parameters()
        monitor.log_scalar("odd/key:with#all", step)
        monitor.end_step()
        assert list(monitor.storage.log_dict) == [step]
    everything = monitor.get_all_metrics()
    assert [everything[step]["activation/fc/mean"] for step in range(4)] == pytest.approx(means, rel=1e-5)
    assert [everything[step]["odd/key:with#all"] for step in range(4)] == [0, 1, 2, 3]
    assert everything[0].keys() == everything[3].keys() == monitor.get_step_metrics().keys()
    monitor.close()
    run = tt.open(tmp_path / "run")
    assert run.series("fc:output", "mean").values.tolist() == pytest.approx(means, rel=1e-5)
    assert "lstm:output.1.0" in run.sites()
    assert "fc:param.weight" in run.sites()
    assert hooks_on(model) == 0


def test_a_sink_is_called_with_each_step_and_its_failure_costs_only_itself() -> None:
    model, seen = mlp(), {}

    def failing(step: int, metrics: dict[str, Any]) -> None:
        raise OSError("no network")

    monitor = watching(model, sinks=[failing, lambda step, metrics: seen.update({step: metrics})])
    with pytest.warns(RuntimeWarning, match="failing.*no network"):
        for step in range(2):
            monitor.begin_step(step)
            model(torch.randn(2, 7))
            monitor.end_step()
    assert seen == monitor.get_all_metrics()


@pytest.mark.parametrize(
    "key",
    [
        "activation/[root module]/mean",
        "activation/[root module][0]/mean",
        "activation/blocks.0.attn.head_1.query/norm",
        "activation/lstm[1.0]/std",
        "parameter/fc.weight/norm",
        "parameter/weight/norm",
        "gradient/fc.bias/norm",
        "gradient_before_clip/fc.bias/norm",
        "RCC (W_t-W_0)x_t/fc/l2norm",
        "loss",
        "activation/odd:name#/mean",
    ],
)
def test_every_key_comes_back_from_its_site(key: str) -> None:
    assert key_of(*site_of(key)) == key


def test_every_key_comes_back_from_hdf5_as_it_went_in(tmp_path: Path) -> None:
    storage = StorageManager()
    keys = ["activation/fc/mean", "plain", "a", "a/values", "a/keys/b", "b//c", "/d", "e/../f", "g∕h"]
    for place, key in enumerate(keys):
        storage.log_scalar(7, key, place)
        storage.log_scalar(9, key, place + 0.5)
    storage.save_hdf5(tmp_path / "x.h5")
    expected = {key: {7: place, 9: place + 0.5} for place, key in enumerate(keys)}
    assert StorageManager.load_hdf5(tmp_path / "x.h5") == expected
    assert sorted(StorageManager.read_hdf5_entry_keys(tmp_path / "x.h5")) == sorted(keys)
    assert StorageManager.read_hdf5_entry(tmp_path / "x.h5", "no such key") is None
    storage.save_hdf5(tmp_path / "y.h5", condensed=False)
    assert StorageManager.load_hdf5(tmp_path / "y.h5")["9"] == {
        key: place + 0.5 for place, key in enumerate(keys)
    }


def test_a_value_in_the_middle_of_a_step_can_be_looked_at() -> None:
    model = mlp()
    monitor = watching(model)
    monitor.begin_step(0)
    model(torch.randn(2, 7))
    (value,) = monitor.get_step_metrics()["activation/0/mean"]
    model(torch.randn(2, 7))
    assert torch.cat(monitor.storage.log_dict[0]["activation/0/mean"]).shape == (2,)
    monitor.end_step()
    assert isinstance(monitor.get_step_metrics()["activation/0/mean"], float)
    assert value.shape == (1,)


def test_the_projects_own_sinks_take_a_monitors_steps(tmp_path: Path) -> None:
    from torchtap.sinks.local import JsonLinesSink
    from torchtap.sinks.trackers import TensorBoardSink

    model = mlp()
    sinks = [TensorBoardSink(tmp_path / "board"), JsonLinesSink(tmp_path / "lines.jsonl")]
    monitor = watching(model, sinks=sinks)
    monitor.begin_step(3)
    model(torch.randn(2, 7))
    monitor.end_step()
    monitor.close()
    assert "2:output" in (tmp_path / "lines.jsonl").read_text()
    assert any(file.stat().st_size > 100 for file in (tmp_path / "board").rglob("events*"))


def test_weights_and_biases_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("wandb")
    from torchtap.sinks.trackers import WandbSink

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    model = mlp()
    monitor = watching(model, sinks=[WandbSink("torchtap-test", mode="offline")])
    monitor.begin_step(0)
    model(torch.randn(2, 7))
    monitor.end_step()
    monitor.close()
    assert list(tmp_path.rglob("*.wandb"))


def test_torchtap_stands_in_for_the_peers_import_names() -> None:
    program = """
from torchtap.monitors.torch_module_monitor import stand_in
stand_in()
import torch_module_monitor, torchtap
from torch_module_monitor import ModuleMonitor, MonitorMixin, RefinedCoordinateCheck
from torch_module_monitor.hooks import HooksManager
from torch_module_monitor.monitor import ModuleMonitor as Same, default_format_module_name_fn
from torch_module_monitor.refined_coordinate_check import l2_norm
from torch_module_monitor.storage import StorageManager
from torch_module_monitor.attention import monitor_scaled_dot_product_attention
assert Same is ModuleMonitor is torchtap.ModuleMonitor
assert isinstance(ModuleMonitor().storage, StorageManager)
assert isinstance(ModuleMonitor().activation_hooks, HooksManager)
assert default_format_module_name_fn("_orig_mod.fc") == "fc"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
