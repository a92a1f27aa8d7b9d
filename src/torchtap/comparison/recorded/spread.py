"""A recording of many ranks, as a comparison needs to know it: what its ranks share, and what is of one rank's loss.

`spread_of` gives it for a run that several ranks wrote, and None for everything else: nothing is asked of the layout of
values that one process recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, final

from torchtap.comparison.align.pairing import KnownSite
from torchtap.comparison.measure.streams import ValueStream
from torchtap.comparison.measure.values import Value
from torchtap.comparison.recorded.numbers import statistics_of
from torchtap.comparison.recorded.recordings import Recording, RunRecording
from torchtap.plan.names import kind_of, read_name

if TYPE_CHECKING:
    from torchtap.placement import Placement
    from torchtap.store.read.reader import Run

__all__ = ["Scaled", "Spread", "spread_of"]

_OF_THE_MODEL = frozenset({"input", "output", "grad_input", "grad_output"})
_OF_VALUES = frozenset({"grad_output", "grad_input"})
_PRINT = ("count", "l1", "l2", "mean", "absmax", "value", "fingerprint")
_COUNTS = frozenset({"count", "zeros", "nans", "infs", "value"})


def spread_of(recording: Recording) -> Spread | None:
    """How a recording is spread over ranks; None where one process, or one rank of several, recorded it."""
    if not isinstance(recording, RunRecording):
        return None
    run = recording.run
    return Spread(run) if run.shown_rank is None and len(run.ranks) > 1 else None


@final
@dataclass(eq=False)
class Spread:
    """A run of several ranks."""

    run: Run
    _known: tuple[int | None, dict[int, set[str]]] = (
        None,
        {},
    )  # the sites of each rank at the last step asked for

    @cached_property
    def ranks(self) -> dict[int, RunRecording]:
        """What each rank recorded, as it recorded it."""
        return {rank: RunRecording(self.run.rank(rank)) for rank in self.run.ranks}

    @cached_property
    def in_stages(self) -> bool:
        """Whether ranks hold different modules, as the stages of a pipeline do."""
        return len({frozenset(each.run.sites()) for each in self.ranks.values()}) > 1

    def placement(self, site: str, step: int) -> Placement | None:
        """Which part of the whole the lowest rank's value is."""
        return self.run.placement(site, step)

    def holders(self, site: str, step: int) -> list[int]:
        """The ranks that have a value of a site at a step."""
        if self._known[0] != step:
            self._known = (
                step,
                {rank: {s.name for s in each.sites(step)} for rank, each in self.ranks.items()},
            )
        return [rank for rank, names in self._known[1].items() if site in names]

    def are_alike(self, site: str, step: int) -> bool:
        """Whether all ranks that have a site have the same statistics, or tensors where only these were kept."""
        return len({self._print(rank, site, step) for rank in self.holders(site, step)}) < 2

    def _print(self, rank: int, site: str, step: int) -> tuple[float | None, ...]:
        part = self.ranks[rank]
        found = {
            name: number for name in _PRINT if (number := part.statistics(name, step).get(site)) is not None
        }
        if not found and (value := part.value(site, step)) is not None:
            found = statistics_of(value)
        return tuple(found.get(name) for name in _PRINT)

    def own_loss(self, site: str, step: int) -> int:
        """How many times as large a gradient is because it is of a rank's own loss, the mean over its own samples.

        Gradients of parameters need nothing: those before the reduction are averaged when ranks are merged.
        """
        placed = self.placement(site, step)
        if placed is None or placed.stage != "local" or kind_of(site) not in _OF_VALUES:
            return 1
        untold = self._untold(site, step)
        return prod(axis.size for axis in placed.axes if axis.share.kind == "batch" or axis.name in untold)

    def is_unknown(self, site: str, step: int) -> bool:
        """Whether nobody said which part of the whole the ranks hold, and they do not all hold the same."""
        return bool(self._untold(site, step))

    def _untold(self, site: str, step: int) -> set[str]:
        """The axes of which nobody said what they do, and along which ranks do not simply hold the same."""
        held = {rank: self.ranks[rank].run.placement(site, step) for rank in self.holders(site, step)}
        placed = {rank: each for rank, each in held.items() if each is not None}
        if len(placed) < 2 or len(placed) < len(held):
            return set()
        axes = next(iter(placed.values())).axes
        unknown = [number for number, axis in enumerate(axes) if axis.share.kind == "unknown"]
        return {axes[number].name for number in unknown if self._differ_along(number, placed, site, step)}

    def _differ_along(self, number: int, placed: Mapping[int, Placement], site: str, step: int) -> bool:
        """Whether ranks that differ along this axis alone hold different values."""
        along: dict[object, set[tuple[float | None, ...]]] = {}
        for rank, each in placed.items():
            others = tuple(axis.at for at, axis in enumerate(each.axes) if at != number)
            along.setdefault((each.root, others), set()).add(self._print(rank, site, step))
        return any(len(prints) > 1 for prints in along.values())

    @cached_property
    def has_root(self) -> bool:
        """Whether the model's own values were recorded: of a list of stages there is no module around them all."""
        return any(not read_name(site).path for site in self.run.sites() if kind_of(site) in _OF_THE_MODEL)

    def is_shared(self, site: str, step: int) -> bool:
        """Whether every rank that has the value should have the same: one of them stands for all when merged."""
        placed = self.placement(site, step)
        return placed is not None and all(axis.share.kind in ("replicate", "unknown") for axis in placed.axes)


@final
@dataclass(frozen=True, eq=False)
class Scaled:
    """A recording all of whose values are so many times as large."""

    recording: Recording
    times: float

    @property
    def label(self) -> str:
        return self.recording.label

    def steps(self) -> list[int]:
        return self.recording.steps()

    def sites(self, step: int) -> list[KnownSite]:
        return self.recording.sites(step)

    def value(self, site: str, step: int) -> Value | None:
        found = self.recording.value(site, step)
        return None if found is None else Value(found.array * self.times, found.dtype)

    def stream(self, site: str, step: int) -> ValueStream | None:
        return None

    def statistics(self, name: str, step: int) -> dict[str, float]:
        found = self.recording.statistics(name, step)
        return found if name in _COUNTS else {site: number * self.times for site, number in found.items()}

    def problems(self) -> list[str]:
        return self.recording.problems()

    def damage(self) -> list[str]:
        return self.recording.damage()
