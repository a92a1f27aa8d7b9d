"""Where the records of a watch go: the run's writer and the sinks, and what they need to know besides.

A consumer that fails costs its own values, never the training (unless ``strict``). What was lost is in ``lost``, in
the run and in one warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from torchtap.errors import RecordingLostError, SessionError
from torchtap.plan.plan import Plan
from torchtap.receive.receiver import SiteState
from torchtap.sanitize import shown
from torchtap.store.record import Consumer, ScalarBlock, StepRecord

if TYPE_CHECKING:
    from torchtap.receive.placing import Placing

__all__ = ["Consumers", "warn"]

_NOT_THE_USERS = ("torchtap.", "torch.", "contextlib.")


@final
class Consumers:
    """The consumers of one watch, and what they have been told."""

    def __init__(
        self, consumers: Sequence[Consumer], *, strict: bool, placing: Placing | None = None
    ) -> None:
        self._consumers = list(consumers)
        self._strict = strict
        self._placing = placing  # None if this process is alone
        self._lost: list[str] = []
        self._warned: set[str] = set()
        self._told = 0  # sites that were described
        self._gone: dict[str, dict[str, Any]] = {}  # sites of modules that the model had before
        # The last block of each phase and of each grid, which is known by the tuples that name its sides.
        self.newest: dict[tuple[str, int, int], ScalarBlock] = {}

    @property
    def lost(self) -> list[str]:
        """What could not be kept, a sentence each: by the watch, by the run's writer, by the sinks."""
        return [
            *self._lost,
            *(text for consumer in self._consumers for text in getattr(consumer, "lost", ())),
        ]

    @property
    def keep_events(self) -> bool:
        """Return True if any consumer keeps events beside the records."""
        return any(hasattr(consumer, "event") for consumer in self._consumers)

    def hand_on(self, record: StepRecord, sites: Sequence[SiteState]) -> None:
        """Hand a record of a watch to every consumer, after what they have to know before it."""
        for block in record.scalars:
            key = (record.phase, id(block.sites), id(block.statistics))
            self.newest.pop(key, None)  # the newest last
            self.newest[key] = block
        # Once at the start and then each time they have doubled: a model may have a new site every step.
        if len(sites) >= 2 * self._told and sites:
            self._told = len(sites)
            self.tell("sites", sites=self.described(sites))
        changes = None if self._placing is None else self._placing.changes(sites, record.phase)
        if changes is not None:
            self.tell("placements", step=record.step, **changes)
        self.write(record)

    def write(self, record: StepRecord) -> None:
        """Hand a record to every consumer."""
        self._call("write", record)

    def tell(self, kind: str, **facts: Any) -> None:
        """Note an event with every consumer that keeps events."""
        self._call("event", kind, **facts)

    def alert(self, level: str, title: str, text: str, step: int | None, site: str | None) -> None:
        """Tell every consumer that has a place for alerts."""
        self._call("alert", level, title, text, step, site)

    def flush(self) -> None:
        """Have everything so far where it belongs."""
        self._call("flush")

    def close(self) -> None:
        """Close every consumer."""
        self._call("close")

    def _call(self, method: str, *args: Any, **facts: Any) -> None:
        """Call a method of every consumer that has it."""
        for consumer in self._consumers:
            function = getattr(consumer, method, None)
            try:
                if function is not None:
                    function(*args, **facts)
            except Exception as error:
                if self._strict:
                    raise
                name = getattr(consumer, "name", type(consumer).__name__)
                self.note_loss(f"{name}.{method} failed: {type(error).__name__}: {error}")

    def described(self, sites: Sequence[SiteState]) -> list[dict[str, Any]]:
        """Return what was found out about the sites, in the order of execution."""
        now: dict[str, dict[str, Any]] = {
            site.name: {
                "name": site.name,
                "shape": None if site.shape is None else list(site.shape),
                "dtype": None if site.dtype is None else str(site.dtype).removeprefix("torch."),
                **({"how": site.how} if site.how else {}),
            }
            for site in sites
        }
        return list((self._gone | now).values())

    def model_changed(self, before: Plan, sites: Sequence[SiteState], now: Plan) -> None:
        """The model has other modules from now on; ``sites`` were seen before."""
        self._gone = {site["name"]: site for site in self.described(sites)}
        had, has = ({port.site.name for port in plan.ports} for plan in (before, now))
        self.tell("model", came=sorted(has - had), gone=sorted(had - has))

    def latest(self, site: str, statistic: str, phase: str | None) -> float:
        """Return the newest number of a site, of any phase if none is named."""
        for (of_phase, *_), block in reversed(list(self.newest.items())):
            if phase in (None, of_phase) and site in block.sites and statistic in block.statistics:
                return float(block.values[block.sites.index(site), block.statistics.index(statistic)])
        raise SessionError(f"no {statistic!r} of {site!r} has arrived yet")

    def note_loss(self, message: str, **facts: object) -> None:
        """Something could not be kept."""
        if self._strict:
            raise RecordingLostError(message)
        if not self._lost:
            warn(f"torchtap lost a value and goes on: {message}")
        # A failure tends to repeat with every step: it is reported once, and the list stays short.
        if message not in self._lost and len(self._lost) < 1000:
            self._write_down(message, **facts)

    def note_spent(self, message: str) -> None:
        """A budget is there to be reached: that is reported like a loss, and is no error even with ``strict``."""
        warn(f"torchtap: {message}")
        self._write_down(message)

    def hint(self, topic: str, message: str) -> None:
        """Warn once of each topic, and note it. A consumer with a method ``hint`` gets the message instead."""
        if topic not in self._warned:
            self._warned.add(topic)
            takers = [take for each in self._consumers if (take := getattr(each, "hint", None)) is not None]
            for take in takers:
                take(topic, message)
            if not takers:
                warn(f"torchtap: {message}")
            self.tell("warning", message=message)

    def _write_down(self, message: str, **facts: object) -> None:
        self._lost.append(message)
        self.tell("lost", message=message, **facts)


def warn(message: str) -> None:
    """One warning, at the user's line; where warnings are errors, it must still not end a training."""
    with suppress(RuntimeWarning):
        warnings.warn(shown(message, 5000, lines=True), RuntimeWarning, stacklevel=_frames_of_ours() + 2)


def _frames_of_ours() -> int:
    """How many frames above the caller are torchtap's own or torch's, which calls the hooks."""
    frame, count = sys._getframe(2), 0
    while frame.f_back is not None and _module_of(frame).startswith(_NOT_THE_USERS):
        frame, count = frame.f_back, count + 1
    return count


def _module_of(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."
