"""What ranks keep beside gradients: running statistics that go apart, and shards that changed owners."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.continuity import Course, course_of
from torchtap.diagnosis.finding import Finding
from torchtap.diagnosis.replicas import Replicas, common_steps, replicas
from torchtap.diagnosis.rules.base import Hit, Need
from torchtap.diagnosis.rules.ranks import RankRule

__all__ = ["BROADCAST", "RanksBuffers", "RanksSwapped"]

BROADCAST = "buffers-broadcast"  # a fact of a rank: a wrapper sends one rank's buffers to all


@final
@dataclass(frozen=True)
class RanksBuffers(RankRule):
    """Batch norm that learns from a rank's own samples alone."""

    name: ClassVar[str] = "ranks-buffers"
    concludes: ClassVar[str] = (
        "Buffers of one and the same model go apart: each rank evaluates, and saves, another model."
    )
    needs: ClassVar[tuple[Need, ...]] = (Need("param", "l2"), Need("buffer", "l2"))
    wrong_if: ClassVar[str] = "Each rank keeps a buffer of its own on purpose, such as a queue of samples."
    causes: ClassVar[tuple[str, ...]] = (
        "broadcast_buffers=False, or a wrapper that sends no buffers (FSDP)",
        "batch norm without SyncBatchNorm in a loop that averages gradients by hand",
    )
    fix: ClassVar[str] = "model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # before it is wrapped"

    def compare(self, chart: Chart) -> Iterable[Finding]:
        if any(own.facts(BROADCAST) for own in chart.ranks.values()):
            return
        weights: dict[str, list[Replicas]] = {}
        for each in replicas(chart, "param"):
            weights.setdefault(each.place.module, []).append(each)
        steps = common_steps(chart)
        hits = []
        for each in replicas(chart, "buffer"):
            apart = np.flatnonzero(each.apart)
            if len(apart) and _stays_one(weights.get(each.place.module, []), int(apart[0])):
                hits.append(Hit(each.place.name, int(steps[apart[0]]), 0.0, each.place.index))
        message = "{site}{also} differs between ranks from step {step} on, though the weights are the same"
        yield from self.found(hits, message)


def _stays_one(weights: list[Replicas], column: int) -> bool:
    """Whether a module's weights are the same on all ranks, also after an update: they are no shards."""
    later = [each.seen & each.same for each in weights]
    return bool(later) and all(
        bool(flags[column:].all()) and bool(flags[column + 1 :].any()) for flags in later
    )


@final
@dataclass(frozen=True)
class RanksSwapped(RankRule):
    """A rank goes on with another rank's shard."""

    name: ClassVar[str] = "ranks-swapped"
    concludes: ClassVar[str] = (
        "A rank goes on with the part of a weight that another rank held: shards were loaded in a wrong order."
    )
    needs: ClassVar[tuple[Need, ...]] = (Need("param", "projection"), Need("update", "projection"))
    wrong_if: ClassVar[str] = "Ranks change places on purpose, and everything that they hold with them."
    causes: ClassVar[tuple[str, ...]] = (
        "a checkpoint of shards is read by another numbering of ranks than it was written by",
    )
    fix: ClassVar[str] = (
        "torch.distributed.checkpoint.load(state)  # or the file of this rank's own place in the mesh"
    )

    def compare(self, chart: Chart) -> Iterable[Finding]:
        whole = {each.place.name for each in replicas(chart, "param") if each.stated or each.same_at_first}
        hits: list[Hit] = []
        told: dict[int, str] = {}
        first = next(iter(chart.ranks.values()))
        for order, place in enumerate(first.grid("projection", "param").places):
            if place.name in whole:
                continue
            courses = {
                rank: found
                for rank, own in chart.ranks.items()
                if (found := course_of(own, place.name)) is not None
            }
            if (swap := _first_swap(courses)) is not None:
                step, words = swap
                hits.append(Hit(place.name, step, 0.0, order))
                told.setdefault(step, words)
        if hits:
            yield from self.say(chart, hits, f"{{site}}{{also}}: from step {{step}} on {told[min(told)]}")


def _first_swap(courses: dict[int, Course]) -> tuple[int, str] | None:
    """The first step at which ranks hold what others should, and who holds whose."""
    jumps: dict[int, list[int]] = {}
    for rank, course in courses.items():
        for step in course.steps[course.jumps].tolist():
            jumps.setdefault(step, []).append(rank)
    for step, ranks in sorted(jumps.items()):
        owners = _owners({rank: courses[rank] for rank in ranks}, step)
        if len(owners) > 1 and len(owners) == len(ranks):
            held = ", ".join(f"rank {rank} holds rank {owner}'s part" for rank, owner in owners.items())
            return step, held
    return None


def _owners(courses: dict[int, Course], step: int) -> dict[int, int]:
    """By rank: the one other rank that should hold at a step what it holds."""
    at = {rank: int(np.searchsorted(course.steps, step)) for rank, course in courses.items()}
    found = {}
    for rank, course in courses.items():
        value, slack = course.found[at[rank]], course.slack[at[rank]]
        near = [
            other
            for other, its in courses.items()
            if other != rank and abs(value - its.expected[at[other]]) <= slack + its.slack[at[other]]
        ]
        if len(near) == 1:
            found[rank] = near[0]
    return found
