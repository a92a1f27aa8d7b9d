"""Several processes measure: the result is that of one, also where runs differ, lack steps or were paired by values."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.optional import need
from torch import nn

import torchtap as tt
from torchtap.cli.compare import command
from torchtap.comparison.recorded import compare_stored


def recorded(folder: Path, *, steps: int = 6, wrong_at: int | None = None, plain: bool = False) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    keep = [tt.Stats()] if plain else [tt.Stats(), tt.Full()]
    with tt.watch(model, folder, ["*:output", "*:param", "*:param_grad"], keep=keep) as watch:
        for step in range(steps):
            with watch.step():
                torch.manual_seed(step)
                loss = model(torch.randn(4, 6)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                if step == wrong_at:
                    model[2].weight.grad *= 1.5
                optimizer.step()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    recorded(folder / "one")
    recorded(folder / "same")
    recorded(folder / "short", steps=4)
    recorded(folder / "wrong", wrong_at=3)
    recorded(folder / "numbers", wrong_at=4, plain=True)
    return folder


@pytest.mark.parametrize("other", ["same", "short", "wrong", "numbers"])
def test_several_processes_give_the_result_of_one(runs: Path, other: str) -> None:
    alone = compare_stored(runs / "one", runs / other)
    several = compare_stored(runs / "one", runs / other, workers=2)
    assert several.to_json() == alone.to_json()
    assert several.verdict == alone.verdict
    assert several.rows == alone.rows


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = need("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("other", ["same", "wrong"])
def test_workers_of_a_ray_cluster_give_the_result_of_one_process(
    runs: Path, other: str, cluster: None
) -> None:
    import ray

    several = compare_stored(runs / "one", runs / other, workers=3, ray=True)  # more than it has processors
    assert several.to_json() == compare_stored(runs / "one", runs / other).to_json()
    assert ray.is_initialized()  # the user's connection stays


def test_without_ray_the_extra_is_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    told = CliRunner().invoke(command, [str(runs / "one"), str(runs / "same"), "--ray"])
    assert "pip install 'torchtap[ray]'" in str(told.exception)


def test_the_command_takes_workers(runs: Path) -> None:
    asked = [str(runs / "one"), str(runs / "wrong"), "--workers", "2", "--json"]
    told = CliRunner().invoke(command, asked)
    assert told.exit_code == 1, told.output
    assert json.loads(told.output)["first"]["step"] == 3
    assert CliRunner().invoke(command, [*asked[:2], "--workers", "0"]).exit_code == 2


def test_a_run_is_opened_anew_where_it_is_sent(runs: Path) -> None:
    run = pickle.loads(pickle.dumps(tt.open(runs / "one", partial=True)))
    assert run.steps().tolist() == list(range(6))
    assert torch.equal(run.tensor("0:output", 2), tt.open(runs / "one").tensor("0:output", 2))
