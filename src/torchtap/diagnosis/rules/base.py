"""What every rule is: a frozen description of what it needs and concludes, and a judgement of a chart.

A rule keeps to this (held by ``torchtap.testing.RuleContract``):
- it says nothing where it has not seen what it needs;
- more history takes nothing back: a finding that was made on the first steps is made, at the same site and step, on
  all of them. So a rule tells the earliest step by which its evidence was there, and looks at windows of few columns;
- it changes nothing, and needs no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.finding import Evidence, Finding, Severity, Trust
from torchtap.diagnosis.places import ChartedSite

__all__ = ["Hit", "Need", "Rule", "gathered"]


@final
@dataclass(frozen=True, slots=True)
class Need:
    """What has to be recorded: a statistic of a kind of sites, or a fact that only a doctor tells (no kind)."""

    kind: str
    statistic: str = ""
    or_kind: str = ""  # another kind that serves as well

    def met(self, chart: Chart) -> bool:
        """Whether the chart has it."""
        if not self.kind:
            return bool(chart.structure.trainable or chart.structure.frozen)
        return any(chart.has(kind, self.statistic) for kind in (self.kind, self.or_kind) if kind)

    @property
    def how(self) -> str:
        """What to do to have it recorded."""
        if not self.kind:
            return "train under tt.doctor(model, optimizer), or with `torchtap run --doctor`"
        return f"record {self.statistic} of *:{self.kind}, or train under tt.doctor"


@final
@dataclass(frozen=True, slots=True)
class Hit:
    """A site at which a rule's condition held, and the step by which it was certain."""

    site: str
    step: int
    value: float
    order: int = 0  # of the site, in execution


class Rule(ABC):
    """A rule. Subclasses are final frozen dataclasses; their fields are the limits, each with a default."""

    name: ClassVar[str]
    concludes: ClassVar[str]  # one sentence: what is wrong
    trust: ClassVar[Trust]
    needs: ClassVar[tuple[Need, ...]]
    wrong_if: ClassVar[str]  # one sentence: what would make the conclusion wrong
    causes: ClassVar[tuple[str, ...]]  # the likeliest first
    fix: ClassVar[str]  # a line of code where there is one

    @abstractmethod
    def judge(self, chart: Chart) -> Iterable[Finding]:
        """What is wrong in a training, as far as the chart shows it."""

    def missing(self, chart: Chart) -> str:
        """Why the rule cannot judge this chart and what to record for it; empty where it can."""
        return "; ".join(dict.fromkeys(need.how for need in self.needs if not need.met(chart)))

    def found(
        self,
        hits: Sequence[Hit],
        message: str,
        *,
        severity: Severity = "warning",
        evidence: Iterable[Evidence] = (),
        causes: tuple[str, ...] = (),
        fix: str = "",
    ) -> Iterable[Finding]:
        """One finding for all hits, that of the earliest step first, then in order of execution.

        ``message`` may name {site}, {also}, {value} and {step}.
        """
        if not hits:
            return
        hits = gathered(hits)
        first = hits[0]
        also = f" (and {len(hits) - 1} more)" if len(hits) > 1 else ""
        text = message.format(site=first.site, also=also, value=first.value, step=first.step)
        yield Finding(
            self.name,
            severity,
            first.site,
            first.step,
            first.value,
            text,
            fix or self.fix,
            tuple(dict.fromkeys(hit.site for hit in hits)),
            causes or self.causes,
            tuple(evidence),
            self.trust,
        )


def gathered(hits: Iterable[Hit]) -> list[Hit]:
    """Hits by step, then by execution."""
    return sorted(hits, key=lambda hit: (hit.step, hit.order))


def hit_at(place: ChartedSite, step: int, value: float) -> Hit:
    """A hit at a place."""
    return Hit(place.name, step, float(value), place.index)
