"""Steps that one recording has and the other has not, or has nothing but logged numbers of.

A step that was not recorded says nothing about the model. It is told, and it keeps two recordings from being called
the same, unless the plan of the one that lacks it leaves out steps by itself: `torchtap run` records more seldom where
recording is dear, so two equal trainings may have different steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from torchtap.comparison.align.pairing import KnownSite
from torchtap.comparison.recorded.recordings import Recording, RunRecording
from torchtap.plan.names import kind_of

__all__ = ["Gap", "Unrecorded", "gaps_between", "some_steps"]


@final
@dataclass(frozen=True, slots=True)
class Gap:
    """Steps of one recording that the other lacks, in a sentence; ``planned`` if its plan may have left them out."""

    told: str
    planned: bool


def gaps_between(
    reference: Recording, target: Recording, left: Sequence[int], right: Sequence[int]
) -> Iterator[Gap]:
    """The steps that are in one recording alone."""
    for recording, steps, other, others in (
        (reference, left, target, right),
        (target, right, reference, left),
    ):
        extra = sorted(set(steps) - set(others))
        if extra:
            told = (
                f"{recording.label}: {len(extra)} steps are not in the other recording ({some_steps(extra)})"
            )
            yield Gap(told, planned=_leaves_out_steps(other) and extra[-1] < max(others))


@final
@dataclass(eq=False)
class Unrecorded:
    """Notices steps of which one recording has nothing but logged numbers."""

    reference: Recording
    target: Recording
    _steps: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    def on_both(
        self, step: int, left: list[KnownSite], right: list[KnownSite]
    ) -> tuple[list[KnownSite], list[KnownSite]]:
        """What is to be compared of a step: its logged numbers alone where one side recorded no more."""
        logged = [_logged(left), _logged(right)]
        bare = [len(logged[0]) == len(left), len(logged[1]) == len(right)]
        if bare[0] == bare[1] or not (left and right):
            return left, right
        self._steps[bare.index(True)].append(step)
        return logged[0], logged[1]

    def told(self) -> list[Gap]:
        """The steps so far, in sentences."""
        sides = zip((self.reference, self.target), self._steps, strict=True)
        return [
            Gap(
                f"{recording.label}: {len(steps)} steps have logged numbers only ({some_steps(steps)})",
                planned=_leaves_out_steps(recording),
            )
            for recording, steps in sides
            if steps
        ]


def some_steps(steps: Sequence[int]) -> str:
    """A few steps, and the last."""
    shown = ", ".join(map(str, steps[:6]))
    return f"{shown} ... {steps[-1]}" if len(steps) > 6 else shown or "none"


def _logged(sites: Sequence[KnownSite]) -> list[KnownSite]:
    return [site for site in sites if kind_of(site.name) == "value"]


def _leaves_out_steps(recording: Recording) -> bool:
    return isinstance(recording, RunRecording) and recording.leaves_out_steps
