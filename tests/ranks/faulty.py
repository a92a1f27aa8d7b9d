"""Trainings on two processes for `test_compare`: four that are right, and some in which the ranks go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks import cases
from tests.ranks.cases import made, rows_of, sharded
from tests.ranks.models import batch, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchtap as tt

STEPS = 2
TAPS = [tt.tap(["*:output", "*:param", "*:param_grad", "*:grad_output"], [tt.Stats(), tt.Full()])]
RIGHT = ("ddp", "fsdp", "tp", "pipeline_gpipe", "pipeline_interleaved")
RIGHT_ON_FOUR = ("hsdp", "fsdp_tp", "pipeline_1f1b")


def train(model: Any, folder: Path, part: int, parts: int, *, spoil: Any = None, **faults: float) -> None:
    """Two steps; ``spoil`` changes the gradients or weights of a step before the optimizer's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tt.watch(model, folder, TAPS) as watch:
        for step in range(STEPS):
            with watch.step():
                optimizer.zero_grad()
                x, y = batch(step)
                output = model(rows_of(x, part, parts) * faults.get("inputs", 1.0))
                (loss_of(output, rows_of(y, part, parts)) * faults.get("loss", 1.0)).backward()
                if spoil is not None:
                    spoil(step)
                optimizer.step()


def faults(rank: int, world: int, folder: Path) -> None:
    twice = DistributedDataParallel(made())

    def reduce_again(step: int) -> None:
        for parameter in twice.parameters():
            dist.all_reduce(parameter.grad)

    train(twice, folder / "reduced_twice", rank, world, spoil=reduce_again)

    train(DistributedDataParallel(made()), folder / "divided", rank, world, loss=1 / world)

    model = DistributedDataParallel(made())
    with model.no_sync():
        train(model, folder / "no_sync", rank, world)

    model = DistributedDataParallel(made(), broadcast_buffers=False)

    def corrupt(step: int) -> None:
        if rank == 1 and step == 0:
            with torch.no_grad():
                model.module.blocks[1].mlp.up.weight[2, 3] += 1.0

    train(model, folder / "corrupted", rank, world, spoil=corrupt)

    train(sharded(made()), folder / "other_data", rank, world, inputs=5.0 if rank == 1 else 1.0)


def faults_on_four(rank: int, world: int, folder: Path) -> None:
    """The same mistakes among four ranks."""
    twice = DistributedDataParallel(made())

    def reduce_again(step: int) -> None:
        for parameter in twice.parameters():
            dist.all_reduce(parameter.grad)

    train(twice, folder / "four_reduced_twice", rank, world, spoil=reduce_again)

    train(DistributedDataParallel(made()), folder / "four_divided", rank, world, loss=1 / world)

    model = DistributedDataParallel(made())
    with model.no_sync():
        train(model, folder / "four_no_sync", rank, world)


def process(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for name in RIGHT if world == 2 else RIGHT_ON_FOUR:
        cases.CASES[name][1](rank, world, Path(folder) / name)
    (faults if world == 2 else faults_on_four)(rank, world, Path(folder))
    dist.barrier()
    dist.destroy_process_group()


def alone(folder: Path) -> None:
    """One process on the joined batches: as the right cases train, as the faulty ones do, and a pipeline's model."""
    cases.alone(folder / "alone")
    train(made(), folder / "one", 0, 1)
    torch.manual_seed(7)
    stack = cases.Stack()
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.05)
    with tt.watch(stack, folder / "stack", cases.TAPS) as watch:
        for step in range(cases.STEPS):
            x, _ = batch(step)
            with watch.step():
                optimizer.zero_grad()
                nn.functional.mse_loss(stack(x), x.roll(1)).backward()
                optimizer.step()
