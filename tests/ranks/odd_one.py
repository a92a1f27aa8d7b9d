"""Three processes for `test_odd_one`: DDP as it should be, and with one rank that goes its own way."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from tests.ranks.cases import made
from tests.ranks.faulty import train
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def process(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    runs = Path(folder)
    train(DistributedDataParallel(made()), runs / "healthy", rank, world)

    corrupted = DistributedDataParallel(made())

    def corrupt(step: int) -> None:
        if rank == 2 and step == 1:
            with torch.no_grad():
                corrupted.module.blocks[1].mlp.up.weight[2, 3] += 1.0

    train(corrupted, runs / "corrupted", rank, world, spoil=corrupt)

    clipped = DistributedDataParallel(made())

    def clip(step: int) -> None:
        if rank == 1:
            nn.utils.clip_grad_norm_(clipped.parameters(), 1e-3)

    train(clipped, runs / "clipped", rank, world, spoil=clip)

    unsynced = DistributedDataParallel(made())
    with unsynced.no_sync():
        train(unsynced, runs / "no_sync", rank, world)

    past = DistributedDataParallel(made())
    train(past.module, runs / "past", rank, world)
    dist.barrier()
    dist.destroy_process_group()
