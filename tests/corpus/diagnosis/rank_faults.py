"""Faults of ranks (E): two to four processes over gloo, one run folder, judged when all have ended."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.corpus.diagnosis.models import MLP, points
from tests.corpus.diagnosis.rank_controls import RANK_CONTROLS
from tests.corpus.diagnosis.rank_kit import Here, Work, launch
from tests.corpus.diagnosis.rank_models import Halves, Norms, Tied, padded_targets
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchtap as tt

__all__ = ["RANK_CASES", "RankCase", "RankOutcome", "tried_on_ranks", "warned_on_ranks"]

LATE = 3  # the step at which what happens once happens


# -- gradients ------------------------------------------------------------------------------------------------


def past_the_wrapper(here: Here) -> None:
    """E1: the forward is called on the module inside."""
    model = here.model()
    here.train(model, here.batches(), called=model.module if here.sick else model)


def part_clipped_on_one(here: Here) -> None:
    """E2: of a model in parts, one rank clips the gradients of what is replicated."""
    torch.manual_seed(here.seed)
    model = Halves(here.rank)

    def clip(step: int) -> None:
        if here.rank == 1 or not here.sick:
            nn.utils.clip_grad_norm_(model.norm.parameters(), 1e-3)

    here.train(model, points(here.seed), before_step=clip)


def one_rank_clips(here: Here) -> None:
    """E4: one of four replicas clips by itself."""
    model = here.model()

    def clip(step: int) -> None:
        if here.odd:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    here.train(model, here.batches(), before_step=clip)


def one_rank_scales(here: Here) -> None:
    """E20: one rank multiplies the gradients that all have by 1.02."""
    model = here.model()

    def scale(step: int) -> None:
        for parameter in model.parameters() if here.odd else ():
            parameter.grad *= 1.02  # type: ignore[operator]

    here.train(model, here.batches(), before_step=scale)


def other_rate(here: Here) -> None:
    """E21: one rank has another learning rate."""
    here.train(here.model(), here.batches(), lr=0.07 if here.odd else 0.05)


def other_decay(here: Here) -> None:
    """E22: one rank has another weight decay."""
    here.train(here.model(), here.batches(), weight_decay=0.1 if here.odd else 0.01)


def skipped_step(here: Here) -> None:
    """E23: one rank leaves an update out."""
    here.train(here.model(), here.batches(), skips=lambda step: here.odd and step == LATE)


def no_reduce(here: Here) -> None:
    """E3: the all-reduce of a layer in parts is missing."""
    torch.manual_seed(here.seed)
    model = Halves(here.rank)
    model.reduces = not here.sick
    here.train(model, points(here.seed))


def reduced_twice(here: Here) -> None:
    """E7: an all-reduce by hand after that of the wrapper."""
    model = here.model()

    def again(step: int) -> None:
        if here.sick:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)

    here.train(model, here.batches(), before_step=again)


def no_gradient_reduce(here: Here) -> None:
    """E8: gradients are averaged by hand, but those of one layer are forgotten."""
    torch.manual_seed(here.seed)
    model = MLP()
    forgotten = "head" if here.sick else "nothing"

    def average(step: int) -> None:
        for name, parameter in model.named_parameters():
            if not name.startswith(forgotten):
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                parameter.grad /= here.world  # type: ignore[operator]

    here.train(model, here.batches(), before_step=average)


def no_sync_left_on(here: Here) -> None:
    """E9: no_sync() around the whole loop."""
    model = here.model()
    if here.sick:
        with model.no_sync():
            here.train(model, here.batches())
    else:
        here.train(model, here.batches())


def norms_not_reduced(here: Here) -> None:
    """E10: norms that every rank of a tensor-parallel group has are not reduced."""
    torch.manual_seed(here.seed)
    model = Halves(here.rank, reduces_norms=not here.sick)
    here.train(model, points(here.seed))


# -- data and losses ------------------------------------------------------------------------------------------


def same_data(here: Here) -> None:
    """E5: each rank reads the same data."""
    here.train(here.model(), here.batches(0 if here.sick else None))


def two_read_the_same(here: Here) -> None:
    """E11: of four ranks with sharded parameters, two read the same data."""
    torch.manual_seed(here.seed)
    model = MLP()
    fully_shard(model)
    here.train(model, here.batches(1 if here.odd else None))


def own_token_count(here: Here) -> None:
    """E12: each rank divides by its own number of targets; they have very different ones."""
    model = here.model()

    def loss(output: Tensor, y: Tensor) -> Tensor:
        y = padded_targets(y, kept=0.9 if here.rank else 0.2)
        total = F.cross_entropy(output, y, reduction="sum", ignore_index=-100)
        count = (y != -100).sum()
        if not here.sick:
            dist.all_reduce(count)
            count = count / here.world
        return total / count

    here.train(model, here.batches(), loss=loss)


# -- weights and buffers --------------------------------------------------------------------------------------


def other_weights(here: Here) -> None:
    """E6: weights of different seeds, with gradients averaged by hand."""
    torch.manual_seed(here.seed + (here.rank if here.sick else 0))
    model = MLP()

    def average(step: int) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= here.world  # type: ignore[operator]

    here.train(model, here.batches(), before_step=average)


def buffers_of_their_own(here: Here) -> None:
    """E13: batch norm whose statistics nobody sends."""
    torch.manual_seed(here.seed)
    model = Norms()
    if not here.sick:
        here.train(DistributedDataParallel(model), here.batches())
    else:
        here.train(DistributedDataParallel(model, broadcast_buffers=False), here.batches())


def corrupted_weight(here: Here) -> None:
    """E14: one element of a weight changes on one of two ranks, between two updates."""
    model = here.model()

    def corrupt(step: int) -> None:
        if here.odd and step == LATE - 1:
            with torch.no_grad():
                model.module.head.weight[1, 2] += 0.5

    here.train(model, here.batches(), after_step=corrupt)


def swapped_elements(here: Here) -> None:
    """E15: two elements of a weight change places on one of two ranks: every statistic stays as it was."""
    model = here.model()

    def swap(step: int) -> None:
        if here.odd and step == LATE - 1:
            with torch.no_grad():
                row = model.module.head.weight[0]
                row[[3, 9]] = row[[9, 3]]

    here.train(model, here.batches(), after_step=swap)


def untied_by_sharding(here: Here) -> None:
    """E16: a head that shares its weight with an embedding gets one of its own when it is made parallel."""
    torch.manual_seed(here.seed)
    model = Tied()
    mesh = init_device_mesh("cpu", (here.world,), mesh_dim_names=("tp",))
    if here.sick:
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=_replicate())})
    else:
        plan = {"body.0": ColwiseParallel(), "body.2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    source = torch.Generator().manual_seed(here.seed)

    def batches(step: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, 32, (8, 7), generator=source)
        return tokens[:, :-1], tokens[:, 1:].roll(step)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output.reshape(-1, 32), y.reshape(-1))

    here.train(model, batches, loss=loss)


def _replicate() -> object:
    from torch.distributed.tensor import Replicate

    return Replicate()


def swapped_shards(here: Here) -> None:
    """E17: in the middle of a training, a checkpoint's shards are loaded by the wrong ranks."""
    torch.manual_seed(here.seed)
    model = Halves(here.rank)

    def reload(step: int) -> None:
        if step == LATE - 1:
            saved: list[dict[str, Tensor]] = [{} for _ in range(here.world)]
            dist.all_gather_object(saved, model.state_dict())
            model.load_state_dict(saved[here.world - 1 - here.rank if here.sick else here.rank])

    here.train(model, points(here.seed), after_step=reload)


# -- processes ------------------------------------------------------------------------------------------------


def slow_rank(here: Here) -> None:
    """E18: one rank's data come late."""
    own = here.batches()

    def late(step: int) -> tuple[Tensor, Tensor]:
        if here.odd and step >= 2:
            time.sleep(0.3)
        return own(step)

    here.train(here.model(), late)


def dead_rank(here: Here) -> None:
    """E19: one rank is killed."""

    def die(step: int) -> None:
        if here.odd and step == LATE:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        here.train(here.model(), here.batches(), before_step=die)
    except RuntimeError as error:  # the others hear that a connection is gone
        if not here.sick or "onnection" not in str(error):
            raise


@dataclass(frozen=True)
class RankCase:
    """A fault of ranks: the right names, sites, step and words of its finding."""

    number: str
    title: str
    train: Callable[[Here], None]
    kinds: tuple[str, ...]
    site: tuple[str, ...]
    step: int
    said: str = ""  # in the message: which rank
    world: int = 2

    def named(self, findings: tt.Findings) -> bool:
        """Whether one of the first two findings names the fault, its site, its first step and its rank."""
        return any(
            each.kind in self.kinds
            and any(part in each.site for part in self.site)
            and each.step == self.step
            and self.said in each.message
            for each in findings[:2]
        )


def _run(folder: str, case: RankCase, seed: int, sick: bool) -> str:
    return str(Path(folder) / f"{case.number}-{seed}-{'sick' if sick else 'healthy'}")


def _works(folder: str, cases: Sequence[RankCase], seeds: Sequence[int]) -> list[Work]:
    return [
        (case.train, seed, sick, _run(folder, case, seed, sick))
        for case in cases
        for seed in seeds
        for sick in (False, True)
    ]


@dataclass(frozen=True)
class RankOutcome:
    """What came of one fault with one seed."""

    case: RankCase
    seed: int
    found: tt.Findings
    twin: tuple[str, ...]  # what was said of the healthy training

    @property
    def good(self) -> bool:
        return self.case.named(self.found) and not self.twin


def tried_on_ranks(cases: Sequence[RankCase], seeds: Sequence[int]) -> Iterator[RankOutcome]:
    """What is found in trainings on several ranks and in their healthy twins."""
    with tempfile.TemporaryDirectory() as folder:
        deadly = [case for case in cases if case.train is dead_rank]
        alive = [case for case in cases if case not in deadly]
        for world in sorted({case.world for case in alive}):
            launch(world, _works(folder, [case for case in alive if case.world == world], seeds))
        for case in deadly:
            for seed in seeds:  # a rank dies once
                launch(case.world, _works(folder, [case], [seed]), dies=True)
        for case in cases:
            for seed in seeds:
                healthy = tt.diagnose(_run(folder, case, seed, sick=False))
                twin = tuple(f"{each.kind} {each.site}" for each in healthy if each.severity != "info")
                yield RankOutcome(case, seed, tt.diagnose(_run(folder, case, seed, sick=True)), twin)


def warned_on_ranks(names: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """What is said of healthy trainings."""
    said = []
    with tempfile.TemporaryDirectory() as folder:
        runs = {(name, seed): f"{folder}/{name}-{seed}" for name in names for seed in seeds}
        launch(4, [(RANK_CONTROLS[name], seed, False, run) for (name, seed), run in runs.items()])
        for (name, seed), run in runs.items():
            found = (each for each in tt.diagnose(run) if each.severity != "info")
            said += [f"{name} (seed {seed}): {each.kind} {each}" for each in found]
    return said


_DRIFT, _UNREDUCED = "ranks-drift", "ranks-unreduced"
RANK_CASES = [
    RankCase("E1", "forward past the wrapper", past_the_wrapper, (_UNREDUCED,), ("layers",), 0, "past the wrapper"),
    RankCase("E2", "one rank clips, of a model in parts", part_clipped_on_one, (_UNREDUCED,), ("norm",), 0, "rank 1's"),
    RankCase("E3", "no all-reduce of a value", no_reduce, ("ranks-disagree",), (":output",), 0),
    RankCase("E4", "one replica clips", one_rank_clips, (_UNREDUCED,), ("layers",), 0, "rank 3's", world=4),
    RankCase("E5", "every rank reads the same", same_data, ("ranks-fed-alike",), (":input",), 0, "all ranks"),
    RankCase("E6", "different first weights", other_weights, ("ranks-apart",), ("layers",), 0),
    RankCase("E7", "reduced twice", reduced_twice, ("ranks-scale",), ("layers",), 0, "2 times"),
    RankCase("E8", "a layer's gradient is not reduced", no_gradient_reduce, (_UNREDUCED,), ("head",), 0, "its own"),
    RankCase("E9", "no_sync left on", no_sync_left_on, (_UNREDUCED,), ("layers",), 0, "no_sync"),
    RankCase("E10", "norms not reduced", norms_not_reduced, (_UNREDUCED,), ("norm",), 0, "its own"),
    RankCase("E11", "two of four read the same", two_read_the_same, ("ranks-fed-alike",), (":input",), 0,
             "ranks 1 and 3", world=4),
    RankCase("E12", "own number of targets", own_token_count, ("ranks-uneven",), (":output",), 0, "rank 0:"),
    RankCase("E13", "own batch statistics", buffers_of_their_own, ("ranks-buffers",), ("buffer.running_mean",), 0),
    RankCase("E14", "a corrupted weight", corrupted_weight, (_DRIFT,), ("head:param.weight",), LATE, "rank 1 alone"),
    RankCase("E15", "two elements swapped", swapped_elements, (_DRIFT,), ("head:param.weight",), LATE, "rank 1 alone"),
    RankCase("E16", "untied by sharding", untied_by_sharding, ("untied",), ("head:param",), 0),
    RankCase("E17", "shards in a wrong order", swapped_shards, ("ranks-swapped",), ("up:param", "down:param"), LATE,
             "rank 0 holds rank 1's"),
    RankCase("E18", "one slow rank", slow_rank, ("rank-slow",), (":value",), 2, "rank 3", world=4),
    RankCase("E20", "one of two scales", one_rank_scales, (_UNREDUCED,), ("layers",), 0, "rank 1's gradients are 1.02"),
    RankCase("E20b", "one of four scales", one_rank_scales, (_UNREDUCED, _DRIFT), ("layers",), 0, "rank 3", world=4),
    RankCase("E21", "another lr", other_rate, (_DRIFT,), ("layers",), 1, "lr is 0.05 on rank 0 and 0.07 on rank 1"),
    RankCase("E21b", "another lr of four", other_rate, (_DRIFT,), ("layers",), 1, "lr is 0.07 on rank 3", world=4),
    RankCase("E22", "another decay", other_decay, (_DRIFT,), ("layers",), 1, "weight_decay is 0.01 on rank 0"),
    RankCase("E22b", "another decay of four", other_decay, (_DRIFT,), ("layers",), 1, "0.1 on rank 3", world=4),
    RankCase("E23", "a skipped update", skipped_step, (_UNREDUCED, _DRIFT), ("layers",), LATE, "rank 1 skipped"),
    RankCase("E23b", "skipped by one of four", skipped_step, (_UNREDUCED, _DRIFT), ("layers",), LATE,
             "rank 3 skipped", world=4),
    RankCase("E19", "one dead rank", dead_rank, ("rank-lost",), (":output",), LATE - 1, "rank 3", world=4),
]  # fmt: skip
