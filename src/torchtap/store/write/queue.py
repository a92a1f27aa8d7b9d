"""The account of what could not be kept: counted by reason, told in sentences, warned about once.

The bounded way from the training to the writer's thread, and what happens when it is full.

The bound is in bytes of records that are not on their way to disk yet. ``block`` makes the training wait;
``drop`` lets a record's tensors go; ``sample`` lets tensors go too, but evenly: under pressure only every
second, fourth, eighth ... step keeps its tensors until the queue has drained. The clock and the numbers of
a step are small and go through in every case, unless they alone fill the queue. Everything that is let go
is counted.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, final

from torchtap.sanitize import shown
from torchtap.store.format.payload import nbytes_of
from torchtap.store.record import StepRecord

__all__ = ["Barrier", "Dropped", "Loss", "Losses", "Pressure", "RecordQueue"]


_MAX_REASONS = 64


@final
@dataclass(frozen=True, slots=True)
class Loss:
    """What could not be kept, and why."""

    reason: str
    tensors: int = 0
    rows: int = 0
    nbytes: int = 0


@final
class Losses:
    """Losses by reason. Safe to read from any thread."""

    def __init__(self) -> None:
        self._by_reason: dict[str, Loss] = {}
        self._lock = threading.Lock()
        self._warned = False

    def __bool__(self) -> bool:
        return bool(self._by_reason)

    def add(self, loss: Loss) -> None:
        """Count a loss, and warn if it is the first."""
        with self._lock:
            reason = loss.reason
            if reason not in self._by_reason and len(self._by_reason) >= _MAX_REASONS:
                reason = "other reasons"
            known = self._by_reason.get(reason, Loss(reason))
            self._by_reason[reason] = Loss(
                reason, known.tensors + loss.tensors, known.rows + loss.rows, known.nbytes + loss.nbytes
            )
            first, self._warned = not self._warned, True
        if first:
            # where warnings are errors, this one must still not end a training
            with suppress(RuntimeWarning):
                warnings.warn(
                    shown(
                        f"torchtap could not record everything ({loss.reason}); the training goes on, "
                        "and the run says what is missing",
                        5000,
                        lines=True,
                    ),
                    RuntimeWarning,
                    stacklevel=2,
                )

    def sentences(self) -> list[str]:
        """Each reason once, with how much it has cost."""
        with self._lock:
            losses = list(self._by_reason.values())
        return [_sentence(loss) for loss in losses]

    def facts(self) -> list[dict[str, int | str]]:
        """The same as JSON."""
        with self._lock:
            return [
                {"reason": loss.reason, "tensors": loss.tensors, "rows": loss.rows, "bytes": loss.nbytes}
                for loss in self._by_reason.values()
            ]


def _sentence(loss: Loss) -> str:
    amounts = []
    if loss.tensors:
        amounts.append(f"{loss.tensors} tensor{'s' if loss.tensors != 1 else ''}")
    if loss.rows:
        amounts.append(f"{loss.rows} record{'s' if loss.rows != 1 else ''} of numbers")
    if not amounts:
        return loss.reason
    return f"{' and '.join(amounts)} lost: {loss.reason}"


Pressure = Literal["block", "drop", "sample"]
_WAKE = 256 << 10


@final
class Barrier:
    """Put between records: set once everything before it is on disk."""

    def __init__(self, *, last: bool = False) -> None:
        self.last = last
        self.done = threading.Event()


@final
class Dropped:
    """What pressure has cost since it was last asked."""

    __slots__ = ("first", "last", "nbytes", "rows", "steps", "tensors")

    def __init__(self) -> None:
        self.steps = self.tensors = self.rows = self.nbytes = 0
        self.first = self.last = 0

    def count(self, step: int, *, tensors: int, rows: int, nbytes: int) -> None:
        self.first = min(self.first, step) if self.steps else step
        self.last = max(self.last, step) if self.steps else step
        self.steps += 1
        self.tensors += tensors
        self.rows += rows
        self.nbytes += nbytes


@final
class RecordQueue:
    """Records and barriers, first in first out, bounded in bytes."""

    def __init__(self, limit: int, policy: Pressure) -> None:
        if policy not in ("block", "drop", "sample"):
            raise ValueError(f"on_pressure={policy!r} is not known; 'block', 'drop' and 'sample' are")
        self._limit = limit
        self._policy = policy
        # Below this the writer is left to sleep: waking it for every few numbers would cost the training
        # more.
        self._wake = min(_WAKE, limit // 4)
        self._urgent = False
        self._items: deque[tuple[StepRecord | Barrier, int]] = deque()
        self._changed = threading.Condition()
        self._nbytes = 0
        self._stride = 1  # of "sample": one step in so many keeps its tensors
        self._since = 0
        self._dropped = Dropped()
        self.waited = 0.0  # seconds that `put` has blocked its callers

    def put(self, record: StepRecord) -> None:
        """Hand a record over, within the bound."""
        numbers, tensors = _sizes(record)
        with self._changed:
            if self._policy == "block":
                if self._nbytes and self._nbytes + numbers + tensors > self._limit:
                    self._wait(numbers + tensors)
                self._keep(record, numbers + tensors)
                return
            if tensors and not self._tensors_fit(numbers + tensors):
                self._dropped.count(record.step, tensors=len(record.tensors), rows=0, nbytes=tensors)
                record, tensors = replace(record, tensors=()), 0
            if self._nbytes and self._nbytes + numbers > 2 * self._limit:
                rows = sum([block.values.size for block in record.scalars])
                self._dropped.count(record.step, tensors=0, rows=rows, nbytes=numbers)
            else:
                self._keep(record, numbers + tensors)

    def _keep(self, record: StepRecord, nbytes: int) -> None:
        self._nbytes += nbytes
        self._items.append((record, nbytes))
        if not self._urgent and self._nbytes >= self._wake:
            self._urgent = True
            self._changed.notify_all()

    def _wait(self, nbytes: int) -> None:
        began = time.monotonic()
        self._urgent = True
        self._changed.notify_all()
        # a record that is larger than the bound itself goes through alone
        self._changed.wait_for(lambda: not self._nbytes or self._nbytes + nbytes <= self._limit)
        self.waited += time.monotonic() - began

    def _tensors_fit(self, nbytes: int) -> bool:
        fits = not self._nbytes or self._nbytes + nbytes <= self._limit
        if self._policy == "drop":
            return fits
        if not fits:
            self._stride = min(2 * self._stride, 1024)
        elif self._stride > 1 and self._nbytes < self._limit // 4:
            self._stride //= 2
        self._since += 1
        if not fits or self._since < self._stride:
            return False
        self._since = 0
        return True

    def put_barrier(self, barrier: Barrier) -> None:
        with self._changed:
            self._items.append((barrier, 0))
            self._urgent = True
            self._changed.notify_all()

    def take(self, timeout: float) -> deque[tuple[StepRecord | Barrier, int]]:
        """Everything that waits, at the latest after ``timeout`` seconds; see `done`."""
        with self._changed:
            self._changed.wait_for(lambda: self._urgent, timeout)
            items, self._items = self._items, deque()
            self._urgent = False
            return items

    def done(self, nbytes: int) -> None:
        """What was taken no longer holds memory."""
        if nbytes:
            with self._changed:
                self._nbytes -= nbytes
                if self._policy == "block":
                    self._changed.notify_all()

    def empty(self) -> bool:
        return not self._items

    def dropped(self) -> Dropped:
        """What was let go since the last call."""
        with self._changed:
            dropped, self._dropped = self._dropped, Dropped()
            return dropped


def _sizes(record: StepRecord) -> tuple[int, int]:
    """Bytes of a record's numbers, with a little for the record itself, and of its tensors."""
    numbers = 64 + sum([block.values.nbytes for block in record.scalars])
    return numbers, sum([nbytes_of(item.value) for item in record.tensors])
