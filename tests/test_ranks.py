"""Several processes of one training: each rank has its own part of the run, under the same site names."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import torchtap as tt


def _train(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    taps = [tt.tap("*:output"), tt.tap("*:param_grad", tt.Full())]
    with tt.watch(model, folder, taps) as watch:
        for _ in range(3):
            with watch.step():
                optimizer.zero_grad()
                model(torch.randn(4 + rank, 4, generator=generator)).pow(2).mean().backward()
                optimizer.step()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(_train, (port, str(path)), nprocs=2)
    return path


def test_each_rank_has_its_own_part_under_names_without_a_wrapper(folder: Path) -> None:
    first, second = tt.open(folder, rank=0), tt.open(folder, rank=1)
    assert first.ranks == [0, 1]
    assert set(first.sites()) == set(second.sites())
    assert not any("module" in site for site in first.sites())
    assert first.series("0:output", "count").values.tolist() == [32.0] * 3
    assert second.series("0:output", "count").values.tolist() == [40.0] * 3


def test_gradients_are_the_averaged_ones_on_every_rank(folder: Path) -> None:
    first, second = tt.open(folder, rank=0), tt.open(folder, rank=1)
    for step in range(3):
        gradient = first.tensor("0:param_grad.weight", step=step)
        assert torch.equal(gradient, second.tensor("0:param_grad.weight", step=step))


def test_statistics_of_ranks_merge_into_those_of_all_values() -> None:
    values = torch.randn(10, 7)
    parts = [tt.Stats().update(None, part) for part in values.split(4)]
    merged = parts[0]
    for part in parts[1:]:
        merged = tt.Stats().merge(merged, part)
    assert float(tt.Stats().result(merged)["std"]) == pytest.approx(values.double().std().item(), rel=1e-9)
