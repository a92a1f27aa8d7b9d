"""A real training on four processes for the pictures: one rank's weight is damaged on the way."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.viewer.recordings import TEXT, WORDS, Transformer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchtap as tt

__all__ = ["train_ranks"]

_LENGTH = 12


def train_ranks(folder: Path, *, ranks: int = 4, steps: int = 48, damaged_at: int = 30) -> None:
    """Train under DDP; at step ``damaged_at`` the last rank but one loses a row of one weight."""
    mp.spawn(_train, (ranks, folder, steps, damaged_at), nprocs=ranks)


def _train(rank: int, ranks: int, folder: Path, steps: int, damaged_at: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{os.path.abspath(folder)}.meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer(layers=3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    words = torch.tensor([WORDS.index(word) for word in TEXT.split()])
    batches = torch.Generator().manual_seed(rank)
    kinds = ["*:output", "*:grad_output", "*:param", "*:param_grad"]
    with tt.watch(model, folder, [tt.tap(kind, keep=tt.Stats()) for kind in kinds]) as watch:
        watch.follow(optimizer)
        for step in range(steps):
            if step == damaged_at and rank == ranks - 2:
                with torch.no_grad():
                    model.module.blocks[1].mlp.down.weight[3] = 0.0
            starts = torch.randint(0, len(words) - _LENGTH - 1, (8,), generator=batches).tolist()
            rows = torch.stack([words[s : s + _LENGTH + 1] for s in starts])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            watch.log(loss=loss.detach())
    dist.destroy_process_group()
