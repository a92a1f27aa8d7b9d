"""A process of `test_trouble`: mode, folder, rank, world, port. Few processes do many things: starting one is dear."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchtap as tt

mode, folder, rank, world, port = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
torch.set_num_threads(1)


def join() -> None:
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))


def train(watched: nn.Module, watch: tt.Watch | None, steps: range, rows: int = 4) -> None:
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
    for step in steps:
        if watch is not None:
            watch.set_step(step)
        optimizer.zero_grad()
        watched(torch.randn(rows, 6)).pow(2).mean().backward()
        optimizer.step()


def norm(value: torch.Tensor) -> torch.Tensor:
    return value.norm()


def whole_norm(value: torch.Tensor) -> torch.Tensor:
    found = value.norm()
    return found.full_tensor() if isinstance(found, DTensor) else found


NORM = tt.Metric(norm)
if mode == "several":
    join()
    # A watch on rank 0 alone, with a metric that would be a collective on a DTensor.
    sharded = fully_shard(model())
    taps = [tt.tap(["*:output", "*:param"]), tt.tap("*:param", NORM), tt.tap("*:update")]
    watch = tt.watch(sharded, folder / "rank0", taps) if rank == 0 else None
    train(sharded, watch, range(3))
    if watch is not None:
        watch.close()
    with tt.watch(
        sharded, folder / "metrics", [*taps, tt.tap("*:param", tt.Metric(whole_norm, whole=True))]
    ) as watch:
        train(sharded, watch, range(2))
    # The first launch of a training that is restarted with fewer ranks, and of one that grows.
    parallel = DistributedDataParallel(model())
    with tt.watch(parallel, folder / "elastic", ["*:output", "*:param"]) as watch:
        train(parallel, watch, range(3))
    # The module inside the wrapper is watched, once before it is wrapped and once after.
    inner = model()
    with tt.watch(inner, folder / "inner", ["*:output", "*:param_grad"]) as watch:
        train(DistributedDataParallel(inner), watch, range(3))
    with tt.watch(parallel.module, folder / "inner_later", ["*:output"]) as watch:
        train(parallel, watch, range(3))
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        alone = model()
        with tt.watch(alone, folder / "growing", ["*:output", "*:param"]) as watch:
            train(alone, watch, range(2), rows=8)
elif mode == "restart":
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
    if rank == 0:
        alone = model()
        with tt.watch(alone, folder / "elastic", ["*:output", "*:param"]) as watch:
            train(alone, watch, range(2, 4), rows=8)
    join()
    parallel = DistributedDataParallel(model())
    with tt.watch(parallel, folder / "growing", ["*:output", "*:param"]) as watch:
        train(parallel, watch, range(1, 3))
    dist.destroy_process_group()
elif mode == "nobody":
    # The watch is made before the process group is: nothing says which process this is.
    watched = model()
    watch = tt.watch(watched, folder, ["*:output"])
    join()
    dist.barrier()
    for step in range(3):
        with watch.step(step):
            watched(torch.randn(2, 6))
            watch.log("who", rank)
        watch.flush()
        dist.barrier()
    watch.close()
    dist.destroy_process_group()
elif mode == "full":
    import resource

    join()
    parallel = DistributedDataParallel(model())
    losses = []
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    watch = (
        None if str(folder).endswith("bare") else tt.watch(parallel, folder, [tt.tap("*:output", tt.Full())])
    )
    for step in range(12):
        if watch is not None:
            watch.set_step(step)
        if step == 4 and rank == 1 and watch is not None:
            watch.flush()
            # From now on no file of this process may grow: as if its disk were full.
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
        optimizer.zero_grad()
        torch.manual_seed(100 * step + rank)
        loss = parallel(torch.randn(64, 6)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
        if watch is not None:
            watch.flush()
    if watch is not None:
        watch.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (folder.parent / f"{folder.name}.losses.{rank}").write_text("\n".join(losses))
    dist.barrier()
    dist.destroy_process_group()
elif mode == "remote":
    # Ranks on two hosts have nothing in common but the network: no folder, no name, no clock to the second.
    socket.gethostname = lambda: f"host-{rank}"
    os.chdir(tempfile.mkdtemp())
    join()
    sharded = fully_shard(model())
    taps = [tt.tap(["*:output", "*:param"], [tt.Stats(), tt.Full()])]
    with tt.watch(sharded, sys.argv[2], taps) as watch:
        train(sharded, watch, range(3))
    dist.barrier()
    dist.destroy_process_group()
elif mode == "killed":
    join()
    watched = model()
    placed = DistributedDataParallel(watched)
    with tt.watch(placed, folder, ["*:output"]) as watch:
        for step in range(40):
            with watch.step(step):
                watched(torch.randn(4, 6))  # past the wrapper: nobody waits for a dead rank
            watch.flush()
            if step == 5:
                dist.barrier()
                (folder / "ready").touch()
            if step >= 5:
                import time

                time.sleep(0.05)
    os._exit(0)  # a group whose other half is dead does not end in good order
