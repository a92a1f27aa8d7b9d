"""How ranks get on: one that all others wait for, one that is gone, ranks whose samples count differently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.finding import Evidence, Finding, Trust
from torchtap.diagnosis.replicas import common_steps
from torchtap.diagnosis.rules.base import Hit, Need
from torchtap.diagnosis.rules.ranks import RankRule, listed
from torchtap.diagnosis.rules.windows import first_run

__all__ = ["SECONDS", "TARGETS", "WEIGHT", "RankLost", "RankSlow", "RanksUneven"]

# Numbers that a doctor logs on each rank.
SECONDS = ":value.seconds_before_backward"
TARGETS, WEIGHT = ":value.targets", ":value.weight_of_a_target"


def _on_ranks(chart: Chart, site: str) -> npt.NDArray[np.float64] | None:
    """A logged number at the common steps, by rank; None where a rank has none."""
    steps = common_steps(chart)
    rows = []
    for own in chart.ranks.values():
        at, values = own.series(site)
        if not len(at):
            return None
        row = np.full(len(steps), np.nan)
        _, here, there = np.intersect1d(steps, at, return_indices=True)
        row[here] = values[there]
        rows.append(row)
    return np.array(rows)


@final
@dataclass(frozen=True)
class RankSlow(RankRule):
    """All others wait for one rank in every step."""

    length: int = 5
    times: float = 2.0  # as long as the next slowest
    seconds: float = 0.02  # and so much longer

    name: ClassVar[str] = "rank-slow"
    concludes: ClassVar[str] = "One rank takes much longer to its backward than every other: all wait for it."
    trust: ClassVar[Trust] = "threshold"
    needs: ClassVar[tuple[Need, ...]] = (Need("value", "value"),)
    wrong_if: ClassVar[str] = "The machine was busy with something else for a while."
    causes: ClassVar[tuple[str, ...]] = (
        "its data take longer to load: a slow disk, longer samples",
        "its processor or device is slower, hot or shared",
    )
    fix: ClassVar[str] = (
        "DataLoader(..., num_workers=n, persistent_workers=True)  # on that rank; then its device"
    )

    def compare(self, chart: Chart) -> Iterable[Finding]:
        taken = _on_ranks(chart, SECONDS)
        if taken is None or taken.shape[1] < self.length:
            return
        ranks, steps = list(chart.ranks), common_steps(chart)
        for index, rank in enumerate(ranks):
            rest = np.delete(taken, index, axis=0).max(axis=0)
            with np.errstate(invalid="ignore"):
                slow = taken[index] > np.maximum(self.times * rest, rest + self.seconds)
            column = first_run(np.asarray(slow), self.length)
            if column is not None:
                begin = column - self.length + 1
                window = slice(begin, column + 1)
                own, others = np.median(taken[index, window]), np.median(rest[window])
                message = (
                    f"rank {rank} takes {own:.3g} s from an update to its next backward, the slowest other rank "
                    f"{others:.3g} s (from step {{step}} on): all wait for it"
                )
                evidence = [Evidence("seconds", float(own), SECONDS, "value", int(steps[begin]))]
                yield from self.found(
                    [Hit(SECONDS, int(steps[begin]), float(own))], message, evidence=evidence
                )
                return


@final
@dataclass(frozen=True)
class RankLost(RankRule):
    """A rank whose record breaks off."""

    name: ClassVar[str] = "rank-lost"
    concludes: ClassVar[str] = "The record of a rank breaks off: its process was killed, or died."
    needs: ClassVar[tuple[Need, ...]] = ()
    wrong_if: ClassVar[str] = "The process was ended on purpose, without closing its watch."
    causes: ClassVar[tuple[str, ...]] = (
        "out of memory, a fault of the machine, or a signal",
        "an error on that rank alone, which its own log tells",
    )
    fix: ClassVar[str] = "torchrun --max-restarts=3 ...  # and look into that rank's own log first"

    def compare(self, chart: Chart) -> Iterable[Finding]:
        lost = [rank for rank, end in chart.ends.items() if end == "interrupted" and rank in chart.ranks]
        last = {rank: int(own.steps[-1]) for rank, own in chart.ranks.items() if len(own.steps)}
        here = [rank for rank in lost if rank in last]
        if not here:
            return
        first = min(here, key=lambda rank: last[rank])
        went_on = [rank for rank in last if rank not in lost]
        rest = f"; {listed(went_on)} ended in good order" if went_on else ""
        also = [rank for rank in lost if rank != first]
        more = f", and so does that of {listed(also)}" if also else ""
        message = f"the record of rank {first} breaks off after step {{step}}{more}{rest}"
        yield from self.found([Hit(":output", last[first], float(first))], message, severity="error")


@final
@dataclass(frozen=True)
class RanksUneven(RankRule):
    """Each rank divides its loss by its own number of targets, and then ranks are averaged."""

    length: int = 2
    apart: float = 1.25  # of the most targets over the fewest; less does no harm
    slack: float = 0.01

    name: ClassVar[str] = "ranks-uneven"
    concludes: ClassVar[str] = (
        "Ranks have different numbers of targets, and each divides its loss by its own: those of a few count more."
    )
    trust: ClassVar[Trust] = "limit"
    needs: ClassVar[tuple[Need, ...]] = (Need("value", "value"),)
    wrong_if: ClassVar[str] = "Every sequence is to count the same, however long it is."
    causes: ClassVar[tuple[str, ...]] = (
        "the loss is divided by the rank's own count in place of all ranks'",
    )
    fix: ClassVar[str] = "dist.all_reduce(count); loss = loss_sum * world_size / count"

    def compare(self, chart: Chart) -> Iterable[Finding]:
        targets, weight = _on_ranks(chart, TARGETS), _on_ranks(chart, WEIGHT)
        if targets is None or weight is None:
            return
        with np.errstate(divide="ignore", invalid="ignore"):
            whole = targets * weight  # what a rank counts in all
            even = whole.max(axis=0) <= (1 + self.slack) * whole.min(axis=0)
            uneven = targets.max(axis=0) > self.apart * targets.min(axis=0)
        column = first_run(np.asarray(even & uneven & (targets.min(axis=0) > 0)), self.length)
        if column is None:
            return
        column -= self.length - 1
        few, many = int(np.argmin(targets[:, column])), int(np.argmax(targets[:, column]))
        ranks, step = list(chart.ranks), int(common_steps(chart)[column])
        message = (
            f"the loss is divided by each rank's own number of targets (rank {ranks[few]}: "
            f"{targets[few, column]:g}, rank {ranks[many]}: {targets[many, column]:g} at step {{step}}): a target of "
            f"rank {ranks[few]} counts {targets[many, column] / targets[few, column]:.3g} times as much"
        )
        evidence = [Evidence("targets", float(targets[few, column]), TARGETS, "value", step)]
        yield from self.found([Hit(":output", step, 0.0)], message, evidence=evidence)
