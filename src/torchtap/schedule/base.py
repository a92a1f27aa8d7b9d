"""What a schedule is, the two that never change, and what a tap's keywords mean.

Apart from the other rules (`rules`), which most sessions never ask for.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from torchtap.errors import PlanError

__all__ = ["NO_STEP", "Always", "Moment", "Never", "OfSteps", "Schedule", "schedule_of"]

NO_STEP = sys.maxsize  # a step that no training reaches


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
        """Return True if the tap is live at this moment."""

    @abstractmethod
    def spec(self) -> dict[str, object]:
        """The schedule as JSON."""

    def earliest(self, moment: Moment) -> int:
        """A step from this one on before which the tap is not live, in no phase, while epoch and batch stay.

        It may be early, never late; a rule that cannot look ahead says this step, and is asked again at the next.
        """
        return moment.step

    @property
    def by_phase(self) -> bool:
        """Return True if a step's phases may have different answers. Where not, one serves them all."""
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


@final
@dataclass(frozen=True, slots=True)
class Never(OfSteps):
    """No step."""

    def live(self, moment: Moment) -> bool:
        return False

    def earliest(self, moment: Moment) -> int:
        return NO_STEP

    def spec(self) -> dict[str, object]:
        return {"never": True}


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
