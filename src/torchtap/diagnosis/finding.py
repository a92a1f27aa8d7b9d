"""What a diagnosis says: findings, and the rules that had nothing to judge by.

Plain frozen data; no run is read here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

from torchtap.sanitize import shown

__all__ = ["Evidence", "Finding", "Findings", "Severity", "Trust", "Unjudged"]

Severity = Literal["error", "warning", "info"]
# How a rule knows: an invariant that holds exactly, the run's own history, a limit that follows from a dtype or a
# structure, or a plain threshold.
Trust = Literal["invariant", "history", "limit", "threshold"]

_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
_TRUSTS: tuple[Trust, ...] = ("invariant", "history", "limit", "threshold")


@final
@dataclass(frozen=True, slots=True)
class Evidence:
    """A number that a finding rests on. Where it is a recorded one, site and statistic say which series to draw."""

    name: str
    value: float
    site: str = ""
    statistic: str = ""
    step: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that looks wrong, the place where it begins, and every place that it touches."""

    kind: str  # the rule's name
    severity: Severity
    site: str  # where it begins
    step: int | None  # the first step that shows it; None if no single step does
    value: float | None  # the number that decided
    message: str  # one sentence: what, where, how much
    advice: str  # what to change: a line of code where there is one
    sites: tuple[str, ...]  # every site concerned, ``site`` first
    causes: tuple[str, ...] = ()  # the likeliest first
    evidence: tuple[Evidence, ...] = ()
    trust: Trust = "threshold"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {**asdict(self), "sites": list(self.sites), "causes": list(self.causes),
                "evidence": [asdict(each) for each in self.evidence]}  # fmt: skip

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sorts findings: the gravest first, then the surest, then the earliest."""
        step = -1 if self.step is None else self.step
        return _SEVERITIES.index(self.severity), _TRUSTS.index(self.trust), step

    def __str__(self) -> str:
        return shown(f"{self.severity}: {self.message}", 5000)


@final
@dataclass(frozen=True, slots=True)
class Unjudged:
    """A rule that could not judge, and why: what was not recorded, or the error that it raised."""

    rule: str
    reason: str

    def __str__(self) -> str:
        return shown(f"{self.rule}: {self.reason}", 5000)


@final
class Findings(list[Finding]):
    """Findings, the gravest first; ``unjudged`` has the rules that could not judge."""

    def __init__(self, found: Iterable[Finding] = (), unjudged: Iterable[Unjudged] = ()) -> None:
        super().__init__(sorted(found, key=lambda finding: finding.rank))
        self.unjudged = tuple(unjudged)
