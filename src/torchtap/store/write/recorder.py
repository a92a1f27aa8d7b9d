"""The writer's thread: takes records from the queue, gathers them, and lets segments appear.

The order in which files of one flush appear is what makes a step whole for readers: first its tensors, then
the clock and the numbers, which is what says that the step exists.

On a failing disk, tensors that could not be written are let go at once; numbers are small and are kept, up to
`_KEPT_BYTES`, to be tried again with the next flush.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, final

from torchtap.store.files.destination import Destination
from torchtap.store.files.launch import launch_facts
from torchtap.store.files.layout import (
    CLOSED,
    FORMAT_NAME,
    FORMAT_VERSION,
    LAUNCH,
    MANIFEST,
    SegmentName,
)
from torchtap.store.format.compress import Compressor
from torchtap.store.format.scalars import ScalarBuffer
from torchtap.store.format.seal import UNSEALED, seal
from torchtap.store.record import StepRecord
from torchtap.store.write.losses import Losses
from torchtap.store.write.merge import Merger
from torchtap.store.write.pressure import Barrier, RecordQueue
from torchtap.store.write.tensors import Loss, TensorSegments

__all__ = ["FLUSH_SECONDS", "RunRecorder"]

FLUSH_SECONDS = 1.0
_FLUSH_BYTES = 8 << 20  # of numbers
_KEPT_BYTES = 32 << 20  # of numbers, while the disk refuses them
_SYNC_SECONDS = 30.0  # the most of numbers that a power failure may cost; of tensors, those since a flush


@final
class RunRecorder:
    """Everything between the queue and the files. `work` is one thread's; `note` may be called by any."""

    def __init__(
        self,
        *,
        manifest: Mapping[str, Any],
        rank: int,
        world: int,
        flush_seconds: float,
        segment_bytes: int,
        compressor: Compressor | None,
    ) -> None:
        self.losses = Losses()
        self.attempt = 0
        self._manifest = {
            "check": UNSEALED,  # first, as `seal` wants it
            "format": {"name": FORMAT_NAME, "version": FORMAT_VERSION},
            **{name: value for name, value in manifest.items() if name not in ("check", "format")},
            "rank": rank,
            "world": world,
            "launch": launch_facts(),
        }
        self._manifest.setdefault("created", datetime.now(UTC).isoformat())
        self._flush_seconds = flush_seconds
        self._segment_bytes = segment_bytes
        self._compressor = compressor
        self._scalars = ScalarBuffer()
        self._next_scalars = self._next_events = 0
        self._lock = threading.Lock()
        self._events: list[bytes] = []
        self._manifest_changed = False
        self._oldest = 0.0  # when the oldest record that is not visible yet arrived
        self._synced = time.monotonic()
        self._unsynced: list[str] = []
        self._written_records = 0
        self._place: Destination | None = None

    def begin(self, place: Destination) -> None:
        """Write the manifest into a fresh part; from then on the run exists."""
        self.attempt = self._manifest["attempt"] = place.part[1]
        if self._manifest["world"] > 1:
            # Small, so that a reader of thousands of ranks can tell which belong together.
            told = ("rank", "world", "attempt", "created", "launch")
            facts = {"check": UNSEALED, **{name: self._manifest[name] for name in told}}
            place.put(LAUNCH, [seal(json.dumps(facts).encode())])
        place.put(MANIFEST, [self._manifest_bytes()])
        self._place = place
        self._merger = Merger(place)
        self._tensors = TensorSegments(
            place,
            segment_bytes=self._segment_bytes,
            compressor=self._compressor,
            appeared=self._merger.appeared,
        )

    def _manifest_bytes(self) -> bytes:
        return seal(json.dumps(self._manifest, indent=1, default=str).encode())

    def note(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Add an event."""
        event = {"check": UNSEALED, "kind": kind, "time": time.time(), **facts}
        line = seal(json.dumps(event, separators=(",", ":"), default=str).encode())
        with self._lock:
            self._events.append(line)

    def change_manifest(self, changes: Mapping[str, Any]) -> None:
        with self._lock:
            self._manifest = {
                **self._manifest,
                **{name: value for name, value in changes.items() if name not in ("check", "format")},
            }
            self._manifest_changed = True

    def work(self, queue: RecordQueue) -> None:
        """The thread. Ends after the last barrier."""
        pause = self._flush_seconds / 4
        while True:
            items = queue.take(pause)
            while items:
                item, nbytes = items.popleft()
                if isinstance(item, Barrier):
                    try:
                        self._guarded(self._barrier, queue, item.last)
                    finally:
                        item.done.set()
                    if item.last:
                        return
                else:
                    self._guarded(self._gather, item)
                    del item  # the record's memory must be free before its bytes are counted as free
                    queue.done(nbytes)
                if self._due():
                    self._guarded(self._flush, queue)
            if self._due():
                self._guarded(self._flush, queue)
            # as long as nothing waits; a merge that is put off is done in a quieter moment or at the end
            while self._place is not None and queue.empty() and self._guarded(self._merger.merge_some):
                pass

    def _guarded(self, action: Callable[..., bool | None], *arguments: Any) -> bool | None:
        # the thread must outlive every mistake, ours included: the training waits for it
        try:
            return action(*arguments)
        except Exception as error:
            self.losses.add(Loss(f"{type(error).__name__}: {error}"))
            return None

    def _gather(self, record: StepRecord) -> None:
        if self._place is None:
            self.losses.add(
                Loss(
                    "the run's folder could not be made",
                    tensors=len(record.tensors),
                    rows=bool(record.scalars),
                )
            )
            return
        if not self._scalars.rows:
            self._oldest = time.monotonic()
        # its tensors belong to it only once its clock is written, so a record that is refused leaves nothing
        self._scalars.add(record)
        for item in record.tensors:
            self._count(self._tensors.add(record.step, item, record.phase))

    def _count(self, loss: Loss | None) -> None:
        if loss is not None:
            self.losses.add(loss)
            self.note("lost", {"reason": loss.reason, "tensors": loss.tensors, "rows": loss.rows})

    def _due(self) -> bool:
        if self._place is None:
            return False
        if self._scalars.rows:
            full = self._scalars.nbytes >= _FLUSH_BYTES
            return full or time.monotonic() - self._oldest >= self._flush_seconds
        return bool(self._events) or self._manifest_changed

    def _flush(self, queue: RecordQueue) -> None:
        place = self._place
        if place is None:
            return
        self._count_dropped(queue)
        if self._scalars.rows:
            self._count(self._tensors.seal())
            self._put_events(place)  # what was noted before a step is there when the step is
            self._put_scalars(place)
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                self._synced = time.monotonic()
                place.sync([*self._unsynced, MANIFEST])
                self._unsynced = []
        self._put_events(place)

    def _put_scalars(self, place: Destination) -> None:
        name = SegmentName("scalars", self._next_scalars, self._next_scalars, *self._scalars.steps)
        try:
            buffers = self._scalars.encode(name, place.part)
            place.put(name.file, buffers)
        except OSError as error:
            if self._scalars.nbytes > _KEPT_BYTES:
                self._count(Loss(error.strerror or str(error), rows=self._scalars.rows))
                self._scalars.clear()
            else:
                self._oldest = time.monotonic()
                self.losses.add(Loss(f"numbers wait for the disk: {error.strerror or error}"))
            return
        self._next_scalars += 1
        self._unsynced.append(name.file)
        self._written_records += self._scalars.rows
        self._scalars.clear()
        self._merger.appeared(name, sum(map(len, buffers)))

    def _put_events(self, place: Destination) -> None:
        with self._lock:
            lines, self._events = self._events, []
            changed, self._manifest_changed = self._manifest_changed, False
            manifest = self._manifest_bytes() if changed else b""
        try:
            if changed:
                place.put(MANIFEST, [manifest])
            if lines:
                name = SegmentName("events", self._next_events, self._next_events)
                text = b"\n".join([*lines, b""])
                place.put(name.file, [text])
                self._next_events += 1
                self._merger.appeared(name, len(text))
        except OSError as error:
            with self._lock:
                self._events = (lines + self._events)[-1000:]
                self._manifest_changed |= changed
            self.losses.add(Loss(f"events wait for the disk: {error.strerror or error}"))

    def _count_dropped(self, queue: RecordQueue) -> None:
        dropped = queue.dropped()
        if dropped.steps:
            loss = Loss(
                "the disk was slower than the training", dropped.tensors, dropped.rows, dropped.nbytes
            )
            self.losses.add(loss)
            facts = {"reason": loss.reason, "tensors": loss.tensors, "rows": loss.rows, "bytes": loss.nbytes}
            self.note("lost", {**facts, "steps": [dropped.first, dropped.last]})

    def _closing(self, place: Destination) -> dict[str, object]:
        """What a reader can hold what it finds against."""
        return {
            "check": UNSEALED,
            "time": time.time(),
            "rank": place.part[0],
            "attempt": place.part[1],
            "records": self._written_records,
            "flushes": {"tensors": self._tensors.flushes, "events": self._next_events},
            "lost": self.losses.facts(),
        }

    def _barrier(self, queue: RecordQueue, last: bool) -> None:
        place = self._place
        if place is None:
            return
        self._flush(queue)
        if last:
            if self._scalars.rows:  # the disk refused them to the end
                self._count(Loss("the disk took no more numbers", rows=self._scalars.rows))
            self._merger.finish()
            try:
                self._put_events(place)
                place.put(CLOSED, [seal(json.dumps(self._closing(place), indent=1).encode())])
            except OSError as error:
                self.losses.add(Loss(f"the run could not be closed: {error.strerror or error}"))
        try:
            place.sync()
        except OSError as error:
            self.losses.add(Loss(f"what was written may not be safe on disk: {error.strerror or error}"))
        if last:
            place.release()
