"""Check a recording while it is made: what the training did against what the records hold."""

from __future__ import annotations

from typing import Any, final

from torchtap.session.tracker import Update
from torchtap.store.record import StepRecord

__all__ = ["Audit"]


@final
class Audit:
    """Count on both sides: events of the training, and records that were handed on."""

    def __init__(self) -> None:
        self.logs = 0
        self.records = 0
        self.updates = 0

    def record(self, record: StepRecord) -> None:
        """A record was handed on."""
        self.records += 1

    def left(self, step: int, updates: tuple[Update, ...]) -> None:
        """A step was left."""
        self.updates += len(updates)

    def result(self) -> dict[str, Any]:
        """Return the facts for the run."""
        return {"updates": self.updates}
