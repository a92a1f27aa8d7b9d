"""What a schedule is, the one that is always live, and what a tap's keywords mean.

Apart from the other rules (`rules`), which most sessions never ask for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from torchtap.errors import PlanError

__all__ = ["Always", "Moment", "OfSteps", "Schedule", "schedule_of"]


@final
@dataclass(frozen=True, slots=True)
class Moment:
    """Where the clock stands. Epoch and batch are ``None`` until somebody sets them."""

    step: int
    epoch: int | None = None
    batch: int | None = None
    phase: str = "train"


class Schedule(ABC):
    """A rule that says at which moments a tap is live."""

    @abstractmethod
    def live(self, moment: Moment) -> bool:
        """Whether the tap is live at this moment."""

    @abstractmethod
    def spec(self) -> dict[str, object]:
        """The schedule as JSON."""

    @property
    def by_phase(self) -> bool:
        """Whether a step's phases may have different answers. Where not, one serves them all."""
        return True

    def __and__(self, other: Schedule) -> Schedule:
        if isinstance(self, Always):
            return other
        if isinstance(other, Always):
            return self
        from torchtap.schedule.rules import Both

        return Both(self, other)

    def __or__(self, other: Schedule) -> Schedule:
        from torchtap.schedule.rules import Either

        return Either(self, other)

    def __invert__(self) -> Schedule:
        from torchtap.schedule.rules import Not

        return Not(self)


class OfSteps(Schedule):
    """One that asks for no phase."""

    __slots__ = ()

    @property
    def by_phase(self) -> bool:
        return False


@final
@dataclass(frozen=True, slots=True)
class Always(OfSteps):
    """Every step."""

    def live(self, moment: Moment) -> bool:
        return True

    def spec(self) -> dict[str, object]:
        return {"always": True}


def schedule_of(
    *,
    every: int | None = None,
    offset: int = 0,
    steps: Collection[int] | None = None,
    epochs: Collection[int] | None = None,
    batches: Collection[int] | None = None,
    first: int | None = None,
    when: Schedule | Callable[[Moment], bool] | None = None,
    phase: str | None = None,
) -> Schedule:
    """The schedule that a tap's keywords describe: live where all that were given agree."""
    schedule: Schedule = Always()
    if not offset and all(each is None for each in (every, steps, epochs, batches, first, when, phase)):
        return schedule  # what most taps ask for
    from torchtap.schedule.rules import Epochs, Every, First, Phase, Steps, When

    if every is not None:
        schedule &= Every(every, offset)
    elif offset:
        raise PlanError(f"offset={offset} needs every=")
    if steps is not None:
        schedule &= Steps(steps)
    if epochs is not None or batches is not None:
        schedule &= Epochs(epochs, batches)
    if first is not None:
        schedule &= First(first)
    if phase is not None:
        schedule &= Phase(phase)
    if when is not None:
        schedule &= when if isinstance(when, Schedule) else When(when)
    return schedule
