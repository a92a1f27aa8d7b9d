"""What a diagnosis says: one finding, and the limits beyond which something counts as one.

Plain frozen data; no run is read here (`diagnosis.checks`) and none is opened (`diagnosis.run`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, final

__all__ = ["Finding", "Kind", "Limits", "Severity"]

Severity = Literal["error", "warning"]
Kind = Literal["nonfinite", "dead", "constant", "saturated", "exploding", "vanishing", "no-gradient"]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that looks wrong, the place where it begins, and every place that it touches."""

    kind: Kind
    severity: Severity
    site: str  # where it begins
    step: int | None  # the first step that shows it; None if no single step does
    value: float | None  # the number that was over the limit
    message: str  # one sentence: what, where, how much
    advice: str  # one sentence: what to look at
    sites: tuple[str, ...]  # every site concerned, ``site`` first

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {**asdict(self), "sites": list(self.sites)}

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}"


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """Where "unusual" begins. The defaults stay silent on trainings that go well."""

    dead_share: float = 0.95  # of an output's values are exactly zero
    dead_units: float = 0.25  # of an output's units never fire in a step
    saturated_tanh: float = 0.05  # mean of 1 - x² at most this: every value sits at ±1
    saturated_sigmoid: float = 0.02  # mean of x(1 - x) at most this: every value sits at 0 or 1
    half_precision: float = 6.0e4  # magnitude next to float16's largest number, 65,504
    exploding: float = 100.0  # times the usual size of this site early in the run
    vanishing: float = 1.0e-4  # of the usual size over the sites of the same kind, or of its own start
    steps: int = 400  # at most so many steps are looked at for a site's usual size
