"""Evaluations of a watched training that no tap was live for: counted, and told when none was recorded at all."""

from __future__ import annotations

import json
from typing import final

from torchtap.plan.plan import Plan
from torchtap.plan.tap import Tap

__all__ = ["Evaluations"]

_OF_EVALUATIONS = {"input", "output", "attention", "value"}


@final
class Evaluations:
    """How often the model was evaluated, and whether any tap was live then."""

    def __init__(self, plan: Plan) -> None:
        self._meant = any(map(_means_evaluations, plan.asked))
        self._missed: dict[str, int] = {}  # by phase
        self._any_live = False

    def begins(self, phase: str, live: bool) -> None:
        """The model is about to be evaluated in a phase, and taps are live for that or not."""
        if live:
            self._any_live = True
        elif phase != "train":
            self._missed[phase] = self._missed.get(phase, 0) + 1

    def told(self) -> str:
        """What is to be said of it at the end; nothing of a single look, such as a test after the training."""
        count = sum(self._missed.values())
        if self._any_live or not self._meant or count < 2:
            return ""
        names = " and ".join(map(repr, self._missed))
        return (
            f"the model was evaluated {count} times (phase {names}), and no tap was live at any of them. An "
            "evaluation belongs to the step that ended last, and every= and steps= count those steps; phase= is "
            f"compared by name. Give evaluations a tap of their own: tt.tap(..., phase={next(iter(self._missed))!r})"
        )


def _means_evaluations(tap: Tap) -> bool:
    """Whether a tap takes what an evaluation brings, and neither a phase nor a function of the user's rules it out."""
    said = json.dumps(tap.schedule.spec())
    by_choice = '"phase": "train"' in said or '"when"' in said
    return not by_choice and any(_OF_EVALUATIONS & selector.kinds for selector in tap.selectors)
