"""Where the records of a watch go: the run's writer and the sinks, and what they need to know besides.

A consumer that fails costs its own values, never the training (unless ``strict``). What was lost is in ``lost``, in
the run and in one warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from torchtap.errors import RecordingLostError, SessionError
from torchtap.plan.plan import Plan
from torchtap.receive.receiver import SiteState
from torchtap.sanitize import shown
from torchtap.store.record import Consumer, ScalarBlock, StepRecord

if TYPE_CHECKING:
    from torchtap.receive.placing import Placing

__all__ = ["Consumers", "Latest", "SiteTable", "warn"]

_NOT_THE_USERS = ("torchtap.", "torch.", "contextlib.")


@final
class Consumers:
    """The consumers of one watch."""

    def __init__(self, consumers: Sequence[Consumer], *, strict: bool) -> None:
        self._consumers = list(consumers)
        self._strict = strict
        self._lost: list[str] = []
        self._warned: set[str] = set()

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

    def write(self, record: StepRecord) -> None:
        """Hand a record to every consumer."""
        for consumer in self._consumers:
            self._try(consumer, "write", partial(consumer.write, record))

    def tell(self, kind: str, **facts: Any) -> None:
        """Note an event with every consumer that keeps events."""
        for consumer in self._consumers:
            event = getattr(consumer, "event", None)
            if event is not None:
                self._try(consumer, "event", partial(event, kind, **facts))

    def alert(self, level: str, title: str, text: str, step: int | None, site: str | None) -> None:
        """Tell every consumer that has a place for alerts."""
        for consumer in self._consumers:
            alert = getattr(consumer, "alert", None)
            if alert is not None:
                self._try(consumer, "alert", partial(alert, level, title, text, step, site))

    def flush(self) -> None:
        """Have everything so far where it belongs."""
        for consumer in self._consumers:
            flush: Callable[[], None] | None = getattr(consumer, "flush", None)
            if flush is not None:
                self._try(consumer, "flush", flush)

    def close(self) -> None:
        """Close every consumer."""
        for consumer in self._consumers:
            self._try(consumer, "close", consumer.close)

    def _try(self, consumer: Consumer, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if self._strict:
                raise
            name = getattr(consumer, "name", type(consumer).__name__)
            self.note_loss(f"{name}.{what} failed: {type(error).__name__}: {error}")

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


@final
class SiteTable:
    """The sites that were described, and those that are not on the model any more."""

    def __init__(self, outlets: Consumers, placing: Placing | None) -> None:
        self._outlets = outlets
        self._placing = placing
        self._told = 0
        self._gone: dict[str, dict[str, Any]] = {}  # sites of modules that the model had before

    def described(self, entries: Sequence[SiteState]) -> list[dict[str, Any]]:
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

    def tell(self, entries: Sequence[SiteState]) -> None:
        """Tell all of them."""
        self._outlets.tell("sites", sites=self.described(entries))

    def before(self, record: StepRecord, entries: Sequence[SiteState]) -> None:
        """Tell what has to be known before this record is handed on."""
        # Once at the start and then each time they have doubled: a model may have a new site every step.
        if len(entries) >= 2 * self._told and entries:
            self._told = len(entries)
            self.tell(entries)
        if self._placing is not None:
            changes = self._placing.changes(entries, record.phase)
            if changes is not None:
                self._outlets.tell("placements", step=record.step, **changes)

    def model_changed(self, before: Plan, entries: Sequence[SiteState], now: Plan) -> None:
        """The model has other modules from now on; ``entries`` were seen before."""
        self._gone = {site["name"]: site for site in self.described(entries)}
        had, has = ({port.site.name for port in plan.ports} for plan in (before, now))
        self._outlets.tell("model", came=sorted(has - had), gone=sorted(had - has))


@final
class Latest:
    """The last block of each phase and of each grid."""

    def __init__(self) -> None:
        # A grid is known by the tuples that name its sides, which are the same from step to step: a block holds them.
        self._blocks: dict[tuple[str, int, int], ScalarBlock] = {}

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, record: StepRecord) -> None:
        """Keep what a step brought."""
        phase, blocks = record.phase, self._blocks
        for block in record.scalars:
            key = (phase, id(block.sites), id(block.statistics))
            blocks.pop(key, None)  # the newest last
            blocks[key] = block

    def number(self, site: str, statistic: str, phase: str | None) -> float:
        """The newest number of a site, of any phase if none is named."""
        for (of_phase, *_), block in reversed(list(self._blocks.items())):
            if phase in (None, of_phase) and site in block.sites and statistic in block.statistics:
                return float(block.values[block.sites.index(site), block.statistics.index(statistic)])
        raise SessionError(f"no {statistic!r} of {site!r} has arrived yet")

    def blocks(self) -> Iterable[ScalarBlock]:
        """All of them, the newest last."""
        return self._blocks.values()
