"""Which sites a watch has seen, told to the run while it goes on: what they hold, and which part of the whole it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from torchtap.plan.plan import Plan
from torchtap.receive.entries import Entry
from torchtap.session.outlets import Outlets
from torchtap.store.record import StepRecord

if TYPE_CHECKING:
    from torchtap.receive.placing import Placing

__all__ = ["ToldSites"]


@final
class ToldSites:
    """What was told, and what of it is not on the model any more."""

    def __init__(self, outlets: Outlets, placing: Placing | None) -> None:
        self._outlets = outlets
        self._placing = placing
        self._told = 0
        self._gone: dict[str, dict[str, Any]] = {}  # sites of modules that the model had before

    def described(self, entries: Sequence[Entry]) -> list[dict[str, Any]]:
        """What was found out about the sites, in the order of execution."""
        now: dict[str, dict[str, Any]] = {
            entry.name: {
                "name": entry.name,
                "shape": None if entry.shape is None else list(entry.shape),
                "dtype": None if entry.dtype is None else str(entry.dtype).removeprefix("torch."),
                **({"how": entry.how} if entry.how else {}),
            }
            for entry in entries
        }
        return list((self._gone | now).values())

    def tell(self, entries: Sequence[Entry]) -> None:
        """Tell all of them."""
        self._outlets.tell("sites", sites=self.described(entries))

    def before(self, record: StepRecord, entries: Sequence[Entry]) -> None:
        """Tell what has to be known before this record is handed on."""
        # Once at the start and then each time they have doubled: a model may have a new site every step.
        if len(entries) >= 2 * self._told and entries:
            self._told = len(entries)
            self.tell(entries)
        if self._placing is not None:
            changes = self._placing.changes(entries, record.phase)
            if changes is not None:
                self._outlets.tell("placements", step=record.step, **changes)

    def model_changed(self, before: Plan, entries: Sequence[Entry], now: Plan) -> None:
        """The model has other modules from now on; ``entries`` were seen before."""
        self._gone = {site["name"]: site for site in self.described(entries)}
        had, has = ({port.site.name for port in plan.ports} for plan in (before, now))
        self._outlets.tell("model", came=sorted(has - had), gone=sorted(had - has))
