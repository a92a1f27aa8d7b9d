"""Healthy trainings on four ranks, some of them odd: nothing is to be said of any."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.corpus.diagnosis.models import MLP
from tests.corpus.diagnosis.rank_kit import Here
from tests.corpus.diagnosis.rank_models import Norms
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchtap as tt

__all__ = ["RANK_CONTROLS"]


def _pair() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def accumulation(here: Here) -> None:
    """Micro-batches under no_sync(), the last one without; all ranks clip."""
    model = here.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = here.batches()
    with tt.doctor(model, optimizer, run=here.run, quiet=True):
        for step in range(8):
            optimizer.zero_grad()
            with model.no_sync():
                x, y = batches(2 * step)
                (F.cross_entropy(model(x), y) / 2).backward()
            x, y = batches(2 * step + 1)
            (F.cross_entropy(model(x), y) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


def batch_norm(here: Here) -> None:
    """Batch norm whose statistics the wrapper sends."""
    torch.manual_seed(here.seed)
    here.train(DistributedDataParallel(Norms()), here.batches())


def sharded(here: Here) -> None:
    """Parameters in shards, norms and zeros among them."""
    torch.manual_seed(here.seed)
    model = _pair()
    nn.init.zeros_(model[1].bias)  # type: ignore[arg-type]
    here.train(fully_shard(model), here.batches())


def sharded_and_replicated(here: Here) -> None:
    """Two groups of two ranks, each with all of the model."""
    torch.manual_seed(here.seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    here.train(fully_shard(_pair(), mesh=mesh), here.batches())


def parallel(here: Here) -> None:
    """A plan over all ranks, which read the same data."""
    torch.manual_seed(here.seed)
    mesh = init_device_mesh("cpu", (here.world,), mesh_dim_names=("tp",))
    model = parallelize_module(_pair(), mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    here.train(model, here.batches(0))


def parallel_and_sharded(here: Here) -> None:
    """A plan over pairs of ranks, shards over the pairs."""
    torch.manual_seed(here.seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(_pair(), mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    here.train(fully_shard(model, mesh=mesh["dp"]), here.batches(mesh["dp"].get_local_rank()))


def watched_on_one_rank(here: Here) -> None:
    """A doctor on one rank alone, of a model in shards: no other rank waits for it."""
    torch.manual_seed(here.seed)
    model = fully_shard(_pair())
    if here.rank == 0:
        here.train(model, here.batches())
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(8):
        x, y = here.batches()(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def unequal_batches(here: Here) -> None:
    """Ranks with different numbers of samples, and a loss that knows of all."""
    model = here.model()
    share = 1.0 if here.rank else 0.25

    def batches(step: int) -> tuple[Tensor, Tensor]:
        x, y = here.batches()(step)
        count = int(share * len(x))
        return x[:count], y[:count]

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, reduction="sum") / 40

    here.train(model, batches, loss=loss)


def averaged_now_and_then(here: Here) -> None:
    """Something else than the optimizer changes the weights, on every rank alike."""
    model = here.model()

    def clamp(step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)

    here.train(model, here.batches(), after_step=clamp)


def plain(here: Here) -> None:
    """Gradients averaged by hand, without any wrapper."""
    torch.manual_seed(here.seed)
    model = MLP()

    def average(step: int) -> None:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= here.world  # type: ignore[operator]

    here.train(model, here.batches(), before_step=average)


RANK_CONTROLS = {
    each.__name__: each
    for each in (
        accumulation,
        batch_norm,
        sharded,
        sharded_and_replicated,
        parallel,
        parallel_and_sharded,
        watched_on_one_rank,
        unequal_batches,
        averaged_now_and_then,
        plain,
    )
}
