"""The rules for when a tap is live, beside always: single ones, and those that combine others; to JSON and back."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, final

from torchtap.errors import PlanError
from torchtap.schedule.base import NO_STEP, Always, Moment, Never, OfSteps, Schedule

__all__ = [
    "Both",
    "Either",
    "Epochs",
    "Every",
    "First",
    "Not",
    "Phase",
    "Steps",
    "When",
    "schedule_from_spec",
]


@final
@dataclass(frozen=True, slots=True)
class Every(OfSteps):
    """Steps ``offset``, ``offset + n``, ``offset + 2n`` …"""

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise PlanError(f"every={self.n!r}: the interval has to be a whole number from 1 on")

    def live(self, moment: Moment) -> bool:
        return moment.step >= self.offset and (moment.step - self.offset) % self.n == 0

    def earliest(self, moment: Moment) -> int:
        return max(self.offset, moment.step + (self.offset - moment.step) % self.n)

    def spec(self) -> dict[str, object]:
        return {"every": self.n, "offset": self.offset}


@final
@dataclass(frozen=True, slots=True)
class Steps(OfSteps):
    """The listed steps; a ``range`` stays a range."""

    steps: range | frozenset[int]
    _in_order: Sequence[int] = field(init=False, repr=False, compare=False)

    def __init__(self, steps: Collection[int]) -> None:
        if isinstance(steps, int):
            raise PlanError(f"steps={steps!r}: give a list or a range of steps, e.g. steps=[{steps}]")
        chosen = steps if isinstance(steps, range) else frozenset(steps)
        object.__setattr__(self, "steps", chosen)
        object.__setattr__(self, "_in_order", _in_order(chosen))

    def live(self, moment: Moment) -> bool:
        return moment.step in self.steps

    def earliest(self, moment: Moment) -> int:
        at = bisect_left(self._in_order, moment.step)
        return self._in_order[at] if at < len(self._in_order) else NO_STEP

    def spec(self) -> dict[str, object]:
        if isinstance(self.steps, range):
            return {"steps": {"start": self.steps.start, "stop": self.steps.stop, "step": self.steps.step}}
        return {"steps": sorted(self.steps)}


@final
@dataclass(frozen=True, slots=True)
class Epochs(OfSteps):
    """The listed epochs, and in them the listed batches (all, where none are listed)."""

    epochs: frozenset[int] | None
    batches: frozenset[int] | None

    def __init__(self, epochs: Collection[int] | None = None, batches: Collection[int] | None = None) -> None:
        for name, given in (("epochs", epochs), ("batches", batches)):
            if isinstance(given, int):
                raise PlanError(f"{name}={given!r}: give a list or a range, e.g. {name}=[{given}]")
        object.__setattr__(self, "epochs", None if epochs is None else frozenset(epochs))
        object.__setattr__(self, "batches", None if batches is None else frozenset(batches))

    def live(self, moment: Moment) -> bool:
        return (self.epochs is None or moment.epoch in self.epochs) and (
            self.batches is None or moment.batch in self.batches
        )

    def earliest(self, moment: Moment) -> int:
        return moment.step if self.live(moment) else NO_STEP

    def spec(self) -> dict[str, object]:
        return {
            "epochs": None if self.epochs is None else sorted(self.epochs),
            "batches": None if self.batches is None else sorted(self.batches),
        }


@final
@dataclass(frozen=True, slots=True)
class First(OfSteps):
    """The first ``n`` steps, counted from step 0."""

    n: int

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise PlanError(f"first={self.n!r}: the number of steps has to be a whole number from 1 on")

    def live(self, moment: Moment) -> bool:
        return moment.step < self.n

    def earliest(self, moment: Moment) -> int:
        return moment.step if self.live(moment) else NO_STEP

    def spec(self) -> dict[str, object]:
        return {"first": self.n}


@final
@dataclass(frozen=True, slots=True)
class Phase(Schedule):
    """Only in passes of one phase: ``train``, ``eval``, or one that ``watch.phase`` names."""

    phase: str

    def __post_init__(self) -> None:
        if not isinstance(self.phase, str) or not self.phase:
            raise PlanError(f"phase={self.phase!r}: a phase is 'train', 'eval' or a name of your own")
        meant = _misspelled_phase(self.phase)
        if meant is not None:
            raise PlanError(
                f"phase={self.phase!r}: did you mean {meant!r}? A name of your own must differ more"
            )

    def live(self, moment: Moment) -> bool:
        return moment.phase == self.phase

    def spec(self) -> dict[str, object]:
        return {"phase": self.phase}


@final
@dataclass(frozen=True, slots=True)
class When(Schedule):
    """Whenever a predicate on the moment says so."""

    predicate: Callable[[Moment], bool]

    def live(self, moment: Moment) -> bool:
        return bool(self.predicate(moment))

    def spec(self) -> dict[str, object]:
        return {"when": getattr(self.predicate, "__qualname__", repr(self.predicate))}


@dataclass(frozen=True, slots=True)
class _OfTwo(Schedule):
    """Asks two others."""

    left: Schedule
    right: Schedule

    @property
    def by_phase(self) -> bool:
        return self.left.by_phase or self.right.by_phase


@final
class Both(_OfTwo):
    """Live where both are."""

    __slots__ = ()

    def live(self, moment: Moment) -> bool:
        return self.left.live(moment) and self.right.live(moment)

    def earliest(self, moment: Moment) -> int:
        return max(self.left.earliest(moment), self.right.earliest(moment))

    def spec(self) -> dict[str, object]:
        return {"both": [self.left.spec(), self.right.spec()]}


@final
class Either(_OfTwo):
    """Live where at least one is."""

    __slots__ = ()

    def live(self, moment: Moment) -> bool:
        return self.left.live(moment) or self.right.live(moment)

    def earliest(self, moment: Moment) -> int:
        return min(self.left.earliest(moment), self.right.earliest(moment))

    def spec(self) -> dict[str, object]:
        return {"either": [self.left.spec(), self.right.spec()]}


@final
@dataclass(frozen=True, slots=True)
class Not(Schedule):
    """Live where the other is not."""

    other: Schedule

    @property
    def by_phase(self) -> bool:
        return self.other.by_phase

    def live(self, moment: Moment) -> bool:
        return not self.other.live(moment)

    def spec(self) -> dict[str, object]:
        return {"not": self.other.spec()}


def _in_order(steps: range | frozenset[int]) -> Sequence[int]:
    if isinstance(steps, range):
        return steps if steps.step > 0 else steps[::-1]
    return sorted(filter(_is_number, steps))


def _is_number(step: object) -> bool:
    """Return True if a step can be it. What else a user lists is no step, and has no order among them."""
    return isinstance(step, Real)


def schedule_from_spec(spec: dict[str, Any]) -> Schedule:
    """The schedule that a `spec` describes."""
    match spec:
        case {"always": True}:
            return Always()
        case {"never": True}:
            return Never()
        case {"every": n, "offset": offset}:
            return Every(n, offset)
        case {"steps": {"start": start, "stop": stop, "step": step}}:
            return Steps(range(start, stop, step))
        case {"epochs": epochs, "batches": batches}:
            return Epochs(epochs, batches)
        case {"both": [left, right]}:
            return Both(schedule_from_spec(left), schedule_from_spec(right))
        case {"either": [left, right]}:
            return Either(schedule_from_spec(left), schedule_from_spec(right))
    return _simple_from_spec(spec)


def _simple_from_spec(spec: dict[str, Any]) -> Schedule:
    match spec:
        case {"steps": list(steps)}:
            return Steps(steps)
        case {"first": n}:
            return First(n)
        case {"phase": phase}:
            return Phase(phase)
        case {"not": other}:
            return Not(schedule_from_spec(other))
        case {"when": name}:
            raise PlanError(f"the schedule was the function {name}: a file does not hold it")
    raise PlanError(f"{spec!r} is not a schedule")


def _misspelled_phase(name: str) -> str | None:
    """Return 'train' or 'eval' if ``name`` is a slip for it. Names that contain one, such as 'pretrain', are not."""
    synonyms = {"training": "train", "evaluation": "eval", "evaluate": "eval"}
    lowered = name.strip().lower()
    if lowered in synonyms:
        return synonyms[lowered]
    for known in ("train", "eval"):
        near = known not in lowered and difflib.SequenceMatcher(None, lowered, known).ratio() >= 0.74
        if name != known and (lowered == known or near):
            return known
    return None
