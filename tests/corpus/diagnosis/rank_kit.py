"""A process of a training on several ranks, and how a group of them is started."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tests.corpus.diagnosis.models import MLP, points
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchtap as tt

__all__ = ["Batches", "Here", "Work", "launch"]

STEPS = 8
Batches = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Here:
    """A process of a training."""

    rank: int
    world: int
    seed: int
    sick: bool
    run: str

    @property
    def odd(self) -> bool:
        """Whether this is the rank that goes wrong, in a training that does."""
        return self.sick and self.rank == self.world - 1

    def model(self) -> DistributedDataParallel:
        torch.manual_seed(self.seed)
        return DistributedDataParallel(MLP())

    def batches(self, rank: int | None = None) -> Batches:
        """This rank's own samples."""
        return points(self.seed + 10 * (self.rank if rank is None else rank))

    def train(
        self,
        watched: nn.Module,
        batches: Batches,
        *,
        called: Callable[[Tensor], Tensor] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        before_step: Callable[[int], None] = lambda step: None,
        after_step: Callable[[int], None] = lambda step: None,
        skips: Callable[[int], bool] = lambda step: False,
        lr: float = 0.05,
        **options: float,
    ) -> None:
        optimizer = torch.optim.SGD(watched.parameters(), lr=lr, **options)
        with tt.doctor(watched, optimizer, run=self.run, quiet=True) as doctor:
            for step in range(STEPS):
                x, y = batches(step)
                optimizer.zero_grad()
                loss((called or watched)(x), y).backward()
                before_step(step)
                if not skips(step):
                    optimizer.step()
                after_step(step)
                doctor.watch.flush()


# What a process does, with a seed, sick or not, and the folder of its run.
Work = tuple[Callable[[Here], None], int, bool, str]


def _process(rank: int, world: int, port: int, works: Sequence[Work], dies: bool) -> None:
    """One of several processes, which do much one after the other: starting them is dear."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for train, seed, sick, run in works:
        train(Here(rank, world, seed, sick, run))
    if dies:
        os._exit(0)  # a group of which one is dead does not end in good order
    dist.barrier()
    dist.destroy_process_group()


def launch(world: int, works: Sequence[Work], *, dies: bool = False) -> None:
    """Have so many processes do all of this; ``dies`` where the last one is to be killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_process, args=(rank, world, port, works, dies)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(1200)
    finally:
        for process in processes:
            process.kill()
    ended = [process.exitcode for process in processes]
    if ended != [0] * (world - 1) + [-signal.SIGKILL if dies else 0]:
        raise RuntimeError(f"the processes ended with {ended}")
