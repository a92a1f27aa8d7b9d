"""What the processes of a test do: each case trains a model in parallel, once bare and once watched.

A case is a function of the processes' rank and number and of a folder, or of None for the bare run. It gives back what
must be the same, bit for bit, whether torchtap watches or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks.models import Model, Small, Stack, batch, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import torchtap as tt

STEPS = 3
Result = dict[str, Tensor]
Case = Callable[[int, int, Path | None], Result]
CASES: dict[str, tuple[int, Case]] = {}  # by name: how many processes, and what they do

TAPS = [
    tt.tap(["*:output", "*:param", "*:param_grad", "*:grad_output"]),
    tt.tap(["*:output", "*:param", "*:param_grad"], tt.Histogram()),
    tt.tap(["*:output", "*:param", "*:param_grad"], tt.Full()),
    tt.tap("*:output", tt.Quantiles(at=(0.5, 0.99))),
]


def case(processes: int) -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        CASES[function.__name__] = processes, function
        return function

    return keep


@contextmanager
def watched(model: Any, folder: Path | None, **options: Any) -> Iterator[Any]:
    """A watch, or nothing that looks like one."""
    if folder is None:

        class Nothing:
            def step(self) -> Any:
                return nullcontext()

        yield Nothing()
    else:
        with tt.watch(model, folder, options.pop("taps", TAPS), **options) as watch:
            yield watch


def rows_of(x: Tensor, part: int, parts: int) -> Tensor:
    return x.chunk(parts)[part]


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def train(
    model: nn.Module,
    folder: Path | None,
    part: int,
    parts: int,
    *,
    micro: int = 1,
    clip: float | None = None,
    forward_only: tuple[int, ...] = (),
    **options: Any,
) -> Result:
    """Train on this part of each step's batch. Gradients and parameters of all steps come back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: Result = {}
    with watched(model, folder, **options) as watch:
        for step in range(STEPS):
            with watch.step():
                if step in forward_only:
                    with torch.no_grad():
                        model(rows_of(batch(step)[0], part, parts))
                    continue
                optimizer.zero_grad()
                for number in range(micro):
                    last = number == micro - 1
                    unsynced = not last and isinstance(model, DistributedDataParallel)
                    with model.no_sync() if unsynced else nullcontext():
                        x, y = batch(step, part=number)
                        output = model(rows_of(x, part, parts))
                        (loss_of(output, rows_of(y, part, parts)) / micro).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        found[f"{step}:{name}"] = local(parameter.grad).detach().clone()
                optimizer.step()
    return found


def alone(folder: Path, model: nn.Module | None = None, **options: Any) -> None:
    """The same training in one process, on the joined batch."""
    train(made() if model is None else model, folder, 0, 1, **options)


def made(hidden: int = 12, **options: Any) -> Model:
    torch.manual_seed(7)
    return Model(hidden, **options)


def small() -> Small:
    torch.manual_seed(7)
    return Small()


# -- DDP ------------------------------------------------------------------------------------------------------


@case(2)
def ddp(rank: int, world: int, folder: Path | None) -> Result:
    return train(DistributedDataParallel(made()), folder, rank, world)


@case(2)
def ddp_accumulation(rank: int, world: int, folder: Path | None) -> Result:
    return train(DistributedDataParallel(made()), folder, rank, world, micro=2)


@case(2)
def ddp_static(rank: int, world: int, folder: Path | None) -> Result:
    return train(DistributedDataParallel(made(), static_graph=True), folder, rank, world)


@case(2)
def ddp_unused(rank: int, world: int, folder: Path | None) -> Result:
    model = DistributedDataParallel(made(unused=True), find_unused_parameters=True)
    return train(model, folder, rank, world)


STAGES = [tt.tap(["*:param_grad", "*:param_grad_local"], tt.Full()), tt.tap("*:param_grad_local")]


@case(2)
def ddp_stages(rank: int, world: int, folder: Path | None) -> Result:
    return train(DistributedDataParallel(made()), folder, rank, world, micro=2, taps=STAGES)


@case(2)
def ddp_compiled(rank: int, world: int, folder: Path | None) -> Result:
    torch.compiler.reset()
    model = torch.compile(DistributedDataParallel(made()), backend="aot_eager")
    return train(model, folder, rank, world, taps=[tt.tap(["*:output", "*:param_grad"])])


@case(2)
def ddp_inductor(rank: int, world: int, folder: Path | None) -> Result:
    """The compiler that people use; of one layer, since each process compiles twice."""
    torch.compiler.reset()
    model = torch.compile(DistributedDataParallel(small()))
    return train(model, folder, rank, world, taps=[tt.tap(["*:output", "*:param_grad"])])


# -- FSDP -----------------------------------------------------------------------------------------------------


def sharded(model: Model, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@case(2)
def fsdp(rank: int, world: int, folder: Path | None) -> Result:
    return train(sharded(made()), folder, rank, world)


@case(2)
def fsdp_kept(rank: int, world: int, folder: Path | None) -> Result:
    taps = [*TAPS, tt.tap("*:param_grad_local")]
    return train(sharded(made(), reshard_after_forward=False), folder, rank, world, clip=0.05, taps=taps)


@case(2)
def fsdp_uneven(rank: int, world: int, folder: Path | None) -> Result:
    return train(sharded(made(hidden=13)), folder, rank, world)


@case(2)
def fsdp_mixed(rank: int, world: int, folder: Path | None) -> Result:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(sharded(made(), mp_policy=policy), folder, rank, world)


@case(2)
def fsdp_forward_only(rank: int, world: int, folder: Path | None) -> Result:
    return train(sharded(made()), folder, rank, world, forward_only=(1,))


@case(2)
def fsdp1(rank: int, world: int, folder: Path | None) -> Result:
    model = FullyShardedDataParallel(made(), use_orig_params=True, device_id=torch.device("cpu"))
    return train(model, folder, rank, world)


@case(4)
def hsdp(rank: int, world: int, folder: Path | None) -> Result:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(sharded(made(), mesh=mesh), folder, rank, world)


# -- under a doctor, who also looks at what ranks have in common ------------------------------------------------


def doctored(model: nn.Module, rank: int, world: int, folder: Path | None) -> Result:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: Result = {}
    with nullcontext() if folder is None else tt.doctor(model, optimizer, run=folder, quiet=True):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(step)
            loss = loss_of(model(rows_of(x, rank, world)), rows_of(y, rank, world))
            loss.backward()
            found[f"{step}:loss"] = loss.detach()
            for name, parameter in model.named_parameters():
                found[f"{step}:{name}"] = local(parameter.grad).detach().clone()
            optimizer.step()
    return found


@case(2)
def ddp_doctor(rank: int, world: int, folder: Path | None) -> Result:
    return doctored(DistributedDataParallel(made()), rank, world, folder)


@case(2)
def fsdp_doctor(rank: int, world: int, folder: Path | None) -> Result:
    return doctored(sharded(made()), rank, world, folder)


# -- tensor parallel ------------------------------------------------------------------------------------------


def parallelized(model: Model, mesh: Any, *, local_outputs: bool = True) -> Model:
    plan: dict[str, Any] = {}
    for number in range(2):
        plan[f"blocks.{number}.mlp.up"] = ColwiseParallel(use_local_output=local_outputs)
        plan[f"blocks.{number}.mlp.down"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


ACTS = {"blocks.*.mlp.act:output": "shard(-1, tp)", "blocks.*.mlp.act:grad_output": "shard(-1, tp)"}


@case(2)
def tp(rank: int, world: int, folder: Path | None) -> Result:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return train(parallelized(made(), mesh), folder, 0, 1, layout=ACTS)


@case(2)
def tp_dtensors(rank: int, world: int, folder: Path | None) -> Result:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return train(parallelized(made(hidden=13), mesh, local_outputs=False), folder, 0, 1)


@case(2)
def tp_sequence(rank: int, world: int, folder: Path | None) -> Result:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = made()
    plan: dict[str, Any] = {}
    for number in range(2):
        plan[f"blocks.{number}"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
        )
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.mlp"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        )
        plan[f"blocks.{number}.mlp.up"] = ColwiseParallel()
        plan[f"blocks.{number}.mlp.down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    for block in model.blocks:
        block.register_forward_hook(_gathered)
    return train(parallelize_module(model, mesh, plan), folder, 0, 1, layout=ACTS)


def _gathered(_: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tuple(each.full_tensor() if isinstance(each, DTensor) else each for each in output)


@case(4)
def fsdp_tp(rank: int, world: int, folder: Path | None) -> Result:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(made(), mesh["tp"])
    part = mesh["dp"].get_local_rank()
    return train(sharded(model, mesh=mesh["dp"]), folder, part, 2, layout=ACTS)


# -- pipelines ------------------------------------------------------------------------------------------------


def pipelined(rank: int, world: int, folder: Path | None, kind: str) -> Result:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    torch.manual_seed(7)
    whole = Stack()
    per_rank = 2 if kind == "interleaved" else 1
    count = world * per_rank
    names = list(whole.layers)
    size = len(names) // count
    stages, parts = [], []
    for number in range(rank, count, world):
        part = Stack(0)
        own = names[number * size : (number + 1) * size]
        part.layers = nn.ModuleDict({name: whole.layers[name] for name in own})
        stages.append(PipelineStage(part, number, count, torch.device("cpu")))
        parts.append(part)
    classes = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    schedule = classes[kind](
        stages if per_rank > 1 else stages[0], n_microbatches=4, loss_fn=nn.MSELoss(), scale_grads=True
    )
    module = nn.ModuleList(parts)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    found: Result = {}
    with watched(parts if per_rank > 1 else parts[0], folder) as watch:
        for step in range(STEPS):
            x, _ = batch(step)
            with watch.step():
                optimizer.zero_grad()
                first, last = rank == 0, rank == (count - 1) % world
                schedule.step(*([x] if first else []), **({"target": x.roll(1)} if last else {}))
                for name, parameter in module.named_parameters():
                    found[f"{step}:{name}"] = parameter.grad.clone()
                optimizer.step()
    return found


@case(2)
def pipeline_gpipe(rank: int, world: int, folder: Path | None) -> Result:
    return pipelined(rank, world, folder, "gpipe")


@case(2)
def pipeline_1f1b(rank: int, world: int, folder: Path | None) -> Result:
    return pipelined(rank, world, folder, "1f1b")


@case(2)
def pipeline_interleaved(rank: int, world: int, folder: Path | None) -> Result:
    return pipelined(rank, world, folder, "interleaved")


# -- the processes --------------------------------------------------------------------------------------------


def process(rank: int, world: int, port: int, folder: str, names: list[str]) -> None:
    """One of several processes: each case bare, then watched; says where the two differ."""
    import json

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for name in names:
        run = CASES[name][1]
        try:
            bare = run(rank, world, None)
            seen = run(rank, world, Path(folder) / name)
            differ = [key for key in bare if not torch.equal(bare[key], seen[key])]
            told = {"gradients": len(bare), "differ": differ}
        except Exception as error:
            import traceback

            told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        (Path(folder) / f"{name}.{rank}.json").write_text(json.dumps(told))
        dist.barrier()
    dist.destroy_process_group()


def launch(folder: Path, names: list[str], world: int) -> None:
    """Run some cases in so many processes. Nothing in the environment says which process is which."""
    import socket

    from torch import multiprocessing

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(process, (world, port, str(folder), names), nprocs=world)
