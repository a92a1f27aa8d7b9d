"""A chart in, findings out: every rule is asked, and one that raises costs itself only.

A finding that was made once stays as it was made. `Ward` keeps them while a training goes on; the same object judges a
finished run, column by column, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.finding import Finding, Findings, Unjudged
from torchtap.diagnosis.rules.base import Rule

__all__ = ["Ward"]


@final
class Ward:
    """The findings of one training so far."""

    def __init__(self, chart: Chart, rules: Sequence[Rule]) -> None:
        self.chart = chart
        self._rules = list(rules)
        self._found: dict[tuple[str, str], Finding] = {}
        self._failed: dict[str, str] = {}

    def look(self) -> list[Finding]:
        """Ask every rule; gives back what is new."""
        new: list[Finding] = []
        for rule in self._rules:
            if rule.name in self._failed:
                continue
            try:
                for finding in rule.judge(self.chart):
                    key = (finding.kind, finding.severity)
                    if key not in self._found:
                        self._found[key] = finding
                        new.append(finding)
            except Exception as error:
                self._failed[rule.name] = f"it raised {type(error).__name__}: {error}"
        return sorted(new, key=lambda finding: finding.rank)

    def findings(self) -> Findings:
        """Everything that was found, and which rules could not judge."""
        unjudged = [Unjudged(name, reason) for name, reason in self._failed.items()]
        unjudged += [
            Unjudged(rule.name, reason)
            for rule in self._rules
            if rule.name not in self._failed and (reason := rule.missing(self.chart))
        ]
        return Findings(self._found.values(), unjudged)
