"""Faults of ranks (E): two processes over gloo, one run folder, judged when both have ended."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchtap as tt
from benchmarks.faults.models import MLP, points

__all__ = ["RANK_CASES", "RankCase", "tried_on_ranks"]

STEPS = 8


def past_the_wrapper(rank: int, seed: int, sick: bool, run: str) -> None:
    """E1: the forward is called on the module inside."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(MLP())
    _train(model, model.module if sick else model, points(seed + 10 * rank), run)


def one_rank_clips(rank: int, seed: int, sick: bool, run: str) -> None:
    """E2: of a model in parts, one rank clips the gradients of what is replicated."""
    torch.manual_seed(seed)
    model = Halves(rank)

    def clip() -> None:
        if rank == 0 or not sick:
            nn.utils.clip_grad_norm_(model.norm.parameters(), 1e-3)

    _train(model, model, points(seed), run, before_step=clip)


def no_reduce(rank: int, seed: int, sick: bool, run: str) -> None:
    """E3: the all-reduce of a layer in parts is missing."""
    torch.manual_seed(seed)
    model = Halves(rank)
    model.reduces = not sick
    _train(model, model, points(seed), run)


def same_data(rank: int, seed: int, sick: bool, run: str) -> None:
    """E5: each rank reads the same data."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(MLP())
    _train(model, model, points(seed if sick else seed + 10 * rank), run)


def other_weights(rank: int, seed: int, sick: bool, run: str) -> None:
    """E6: weights of different seeds, with gradients averaged by hand."""
    torch.manual_seed(seed + (rank if sick else 0))
    model = MLP()

    def average() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2

    _train(model, model, points(seed + 10 * rank), run, before_step=average)


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the same on each."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Halves(nn.Module):
    """Half of a hidden layer on each of two ranks; the norm before it is on both."""

    reduces = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        whole = nn.Linear(16, 64), nn.Linear(64, 4, bias=False)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4, bias=False)
        with torch.no_grad():
            part = slice(32 * rank, 32 * rank + 32)
            self.up.weight.copy_(whole[0].weight[part])
            self.up.bias.copy_(whole[0].bias[part])
            self.down.weight.copy_(whole[1].weight[:, part])
        self.norm.weight.register_hook(_summed)
        self.norm.bias.register_hook(_summed)

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = self.down(F.relu(self.up(self.norm(x))))
        return _Sum.apply(part) if self.reduces else part  # type: ignore[no-any-return, no-untyped-call]


def _summed(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


def _train(
    watched: nn.Module,
    called: nn.Module,
    batches: Callable[[int], tuple[Tensor, Tensor]],
    run: str,
    before_step: Callable[[], None] = lambda: None,
) -> None:
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.05)
    with tt.doctor(watched, optimizer, run=run, quiet=True):
        for step in range(STEPS):
            x, y = batches(step)
            optimizer.zero_grad()
            F.cross_entropy(called(x), y).backward()
            before_step()
            optimizer.step()


@dataclass(frozen=True)
class RankCase:
    """A fault of ranks."""

    number: str
    title: str
    train: Callable[[int, int, bool, str], None]
    kinds: tuple[str, ...]
    site: tuple[str, ...]
    earliest: int


def _work(rank: int, case: RankCase, seed: int, sick: bool, run: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        case.train(rank, seed, sick, run)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def tried_on_ranks(case: RankCase, seed: int, *, sick: bool = True) -> tt.Findings:
    """The findings of one training on two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        mp.spawn(_work, (case, seed, sick, run, port), nprocs=2)  # type: ignore[no-untyped-call]
        return tt.diagnose(run)


RANK_CASES = [
    RankCase("E1", "forward past the wrapper", past_the_wrapper, ("ranks-drift",), ("layers", "head"), 1),
    RankCase("E2", "one rank clips", one_rank_clips, ("ranks-drift",), ("norm",), 1),
    RankCase("E3", "no all-reduce", no_reduce, ("ranks-disagree",), (":output",), 0),
    RankCase("E5", "every rank reads the same", same_data, ("ranks-fed-alike",), (":input",), 0),
    RankCase("E6", "different first weights", other_weights, ("ranks-apart",), ("layers",), 0),
]
