"""Whether the step that is about to be used looks like an incident: judged from its numbers, before the update.

A value that is not finite, or a loss or gradient norm far above its own history. What a model always does is no
incident: a site that holds infinities or NaN in the first steps while loss and gradients are finite (a mask, padding)
is known from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from torchtap.diagnosis.flight.history import Usual, rows_with
from torchtap.store.record import ScalarBlock

__all__ = ["Incident", "Judge", "StepNumbers"]


@final
@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What is known of a step just before its update."""

    values: ScalarBlock | None  # of the sites
    loss: float | None
    norm: float | None  # of all gradients, before they were clipped; None where a scaler left the update out


@final
@dataclass(frozen=True, slots=True)
class Incident:
    """Why a step is kept."""

    kind: Literal["nonfinite", "spike", "finding", "exception", "asked", "rank"]
    reason: str  # one sentence
    site: str = ""


def _at_sites(counts: Mapping[str, float]) -> Incident:
    site, count = next(iter(counts.items()))
    more = f" and {len(counts) - 1} more sites" if len(counts) > 1 else ""
    return Incident("nonfinite", f"{count:,.0f} values that are not finite at {site}{more}", site)


@final
class Judge:
    """Knows what is usual in one training."""

    def __init__(self, k: float | None, steps: int) -> None:
        self._losses = None if k is None else Usual(k, steps)
        self._norms = None if k is None else Usual(k, steps)
        self._known: set[str] = set()  # sites that are not finite by design
        self._first = True

    def judge(self, numbers: StepNumbers) -> Incident | None:
        """Why this step is to be kept, or None."""
        found = self._nonfinite(numbers)
        if found is None:
            found = self._spike("loss", self._losses, numbers.loss) or self._spike(
                "gradient norm", self._norms, numbers.norm
            )
        self._first = False
        return found

    def _nonfinite(self, numbers: StepNumbers) -> Incident | None:
        bad = rows_with(numbers.values, "nans", "infs") if numbers.values is not None else {}
        odd = [
            Incident("nonfinite", f"{name} is {number}")
            for name, number in (("the loss", numbers.loss), ("the norm of the gradients", numbers.norm))
            if number is not None and not math.isfinite(number)
        ]
        if self._first and not odd and (numbers.loss is not None or numbers.norm is not None):
            self._known.update(bad)
        news = {site: count for site, count in bad.items() if site not in self._known}
        return _at_sites(news) if news else next(iter(odd), None)

    def _spike(self, what: str, usual: Usual | None, value: float | None) -> Incident | None:
        limit = usual.judge(value) if usual is not None and value is not None else None
        if limit is None:
            return None
        return Incident("spike", f"the {what} is {value:.4g}, beyond its own history (limit {limit:.4g})")
