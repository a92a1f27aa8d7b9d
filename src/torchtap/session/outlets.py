"""Where a watch's records go, and what goes wrong on the way: the run's writer and the sinks.

A consumer that fails costs its own values, never the training (unless ``strict``). What was lost is in ``lost``, in
the run and in one warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, final

from torchtap.errors import RecordingLostError
from torchtap.sanitize import shown
from torchtap.store.record import Consumer, StepRecord

__all__ = ["Outlets", "warn"]

_NOT_THE_USERS = ("torchtap.", "torch.", "contextlib.")


@final
class Outlets:
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
        """Whether any consumer keeps what is told beside the records."""
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

    def note_loss(self, message: str) -> None:
        """Something could not be kept."""
        if self._strict:
            raise RecordingLostError(message)
        if not self._lost:
            warn(f"torchtap lost a value and goes on: {message}")
        # A failure tends to repeat with every step: it is told once, and the list stays short.
        if message not in self._lost and len(self._lost) < 1000:
            self._write_down(message)

    def note_spent(self, message: str) -> None:
        """A budget is there to be reached: that is told like a loss, and is no error to the strictest."""
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

    def _write_down(self, message: str) -> None:
        self._lost.append(message)
        self.tell("lost", message=message)


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
