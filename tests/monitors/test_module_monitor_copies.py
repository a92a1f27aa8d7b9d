"""Copies, pickles and wrappers of a monitored model: they carry nothing live and change no name."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import mlp
from tests.monitors.module_monitoring import Scaled, watching
from torch import nn


def test_a_copy_of_a_monitored_model_is_not_monitored() -> None:
    model = nn.Sequential(nn.Linear(4, 2), Scaled())
    monitor = watching(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    monitor.begin_step(0)
    y = model(torch.ones(3, 4))
    twin(torch.ones(3, 4))
    monitor.end_step()
    got = monitor.get_step_metrics()
    assert got["activation/1/norm"] == pytest.approx(y.norm().item(), rel=1e-5)
    assert got["custom/scaled"] == pytest.approx(y.mean().item(), rel=1e-5)


def test_a_monitored_model_can_be_pickled_and_saved_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 2), Scaled())
    monitor = watching(model)
    monitor.begin_step(0)
    for restored in (pickle.loads(pickle.dumps(model)), _saved_and_loaded(model)):
        assert not restored[1].is_monitoring
        assert torch.equal(restored(torch.ones(1, 4)), model(torch.ones(1, 4)))
    monitor.end_step()


def _saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_pickle_of_a_monitored_model_needs_no_torchtap_to_be_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    monitor = watching(model)
    monitor.begin_step(0)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    program = """
import pickle, sys, torch
sys.modules["torchtap"] = None
model = pickle.load(open(sys.argv[1], "rb"))
assert model(torch.ones(1, 4)).shape == (1, 2)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "model.pickle")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_names_of_a_wrapped_model_have_no_trace_of_the_wrapper() -> None:
    model = mlp()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        monitor = watching(wrapped)
        monitor.add_gradient_metric("norm", lambda g: g.norm(), metric_regex=r"0\.weight$")
        monitor.begin_step(0)
        wrapped(torch.randn(2, 7)).sum().backward()
        monitor.monitor_gradients()
        monitor.end_step()
    finally:
        dist.destroy_process_group()
    got = monitor.get_step_metrics()
    assert {"activation/[root module]/mean", "activation/0/mean", "gradient/0.weight/norm"} <= set(got)
    assert not any("module." in key for key in got)


def test_a_compiled_model_is_monitored_and_not_broken_up() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = mlp()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    monitor = watching(compiled, monitor_step_fn=lambda step: step % 2 == 0)
    x = torch.randn(3, 7)
    for step in range(5):
        monitor.begin_step(step)
        y = compiled(x)
        y.sum().backward()
        monitor.monitor_parameters()
        monitor.end_step()
    assert len(graphs) == 1
    assert sorted(monitor.get_all_metrics()) == [0, 2, 4]
    for metrics in monitor.get_all_metrics().values():
        assert metrics["activation/2/norm"] == pytest.approx(model(x).norm().item(), rel=1e-5)
    torch._dynamo.reset()
