"""Rules that rest on a fact alone: an exact invariant that a probe saw broken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.facts import Fact
from torchtap.diagnosis.finding import Finding, Severity, Trust
from torchtap.diagnosis.rules.base import Hit, Need, Rule

__all__ = ["FactRule"]


class FactRule(Rule):
    """A finding for the facts that have the rule's name. Subclasses say what they mean."""

    trust: ClassVar[Trust] = "invariant"
    needs: ClassVar[tuple[Need, ...]] = (Need(""),)
    message: ClassVar[str]
    severity: ClassVar[Severity] = "error"

    def judge(self, chart: Chart) -> Iterable[Finding]:
        facts = chart.facts(self.name)
        hits = [Hit(fact.site, fact.step, fact.value, order) for order, fact in enumerate(facts)]
        if hits:
            yield from self.found(hits, self.message + self.told(facts), severity=self.grade(facts, chart))

    def grade(self, facts: list[Fact], chart: Chart) -> Severity:
        """How grave it is."""
        return self.severity

    def told(self, facts: list[Fact]) -> str:
        """What the first fact adds to the message."""
        text = facts[0].text.replace("{", "(").replace("}", ")")
        return f": {text}" if text else ""
