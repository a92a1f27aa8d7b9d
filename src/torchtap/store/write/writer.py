"""Record a run: `RunWriter` takes records from the training and writes segments into a folder.

It guarantees:
- ``write`` only hands the record to a thread of its own; the caller copies no tensor and touches no file;
- nothing is ever overwritten: a folder that has a run gets a further attempt beside it;
- a step becomes visible as a whole, at most about `FLUSH_SECONDS` after it was written: its tensors appear first, then
  the clock and the numbers, which make the step exist;
- after ``flush`` everything written so far is on disk, also if the power fails;
- no failure of the disk reaches the caller, unless ``strict``: losses are counted, warned about once, listed in
  ``lost`` and, if that can still be written, noted in the run;
- a later ``os.chdir`` has no effect; no link inside the run folder is followed.

On a failing disk, tensors that could not be written are dropped at once. Numbers are small: up to `_KEPT_BYTES` are
kept and tried again with the next flush.

Not here: the bytes (`scalars`), the files (`segments`), the bound (`queue`), the limit on the disk (`thin`).
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, final

from torchtap.errors import RecordingLostError, SessionError
from torchtap.store.files.folder import Destination, LocalDestination, anchored
from torchtap.store.files.layout import (
    CLOSED,
    EVENT_RUN_ID,
    FORMAT_NAME,
    FORMAT_VERSION,
    LAUNCH,
    LAUNCHES,
    MANIFEST,
    RUN_ID,
    launch_digest,
    launch_facts,
    node_ranks,
)
from torchtap.store.files.system import has_numbered_locks
from torchtap.store.format.checksum import UNSEALED, seal
from torchtap.store.format.pack import PackDestination
from torchtap.store.format.payload import Compressor, make_compressor
from torchtap.store.format.scalars import ScalarItems
from torchtap.store.record import StepRecord
from torchtap.store.write.queue import Barrier, Loss, Losses, Pressure, RecordQueue
from torchtap.store.write.segments import EventLines, Segments, TensorItems
from torchtap.store.write.thin import Thinner

__all__ = ["FLUSH_SECONDS", "RunWriter"]

FLUSH_SECONDS = 1.0
_FLUSH_BYTES = 8 << 20  # of numbers
_MOST_ENTRIES = 2048  # of a tensor segment: to find one tensor, the head of its segment has to be read
_MOST_EVENTS = 1000  # while the disk refuses them
_KEPT_BYTES = 32 << 20  # of numbers, while the disk refuses them
_PACKED_FROM = 64  # ranks of a launch: those of a node write into one file
_SYNC_SECONDS = 30.0  # the most of numbers that a power failure may cost; of tensors, those since a flush
_RESERVED = ("check", "format", RUN_ID)  # fields of the manifest that the writer itself sets


@final
class RunWriter:
    """Write one rank's part of a run. One process, any number of threads.

    ``disk`` limits the bytes of this attempt: older records are thinned out in a regular way (`thin`). None keeps
    every record.

    ``pack`` is the first and the last rank of this node: their processes append to one file (`format.pack`). Launches
    of 64 ranks or more do so if the launcher states them (torchrun, Slurm). A remote folder is never packed.

    Raises `SessionError` if this process already records the same rank into the same folder: two recordings of one
    rank at the same time would hide each other.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        manifest: Mapping[str, object],
        rank: int = 0,
        world: int = 1,
        on_pressure: Pressure = "block",
        queue_bytes: int = 256 << 20,
        strict: bool = False,
        compress: str | None = None,
        flush_seconds: float = FLUSH_SECONDS,
        segment_bytes: int = 64 << 20,
        disk: int | None = None,
        pack: tuple[int, int] | None = None,
    ) -> None:
        self.folder = anchored(os.fspath(folder))
        self._rank = rank
        self._strict = strict
        self._queue = RecordQueue(queue_bytes, on_pressure)
        self._closed = False
        self._process = os.getpid()
        compressor = make_compressor(compress)
        _register(self)
        self._recorder = _Recorder(manifest, rank, world, flush_seconds, disk)
        try:
            self._recorder.begin(_place(self.folder, rank, world, pack), segment_bytes, compressor)
        except OSError as error:
            reason = f"nothing is recorded: cannot begin a run in {self.folder}: {error.strerror or error}"
            if strict:
                _open_writers.discard(self)
                raise RecordingLostError(reason) from error
            self._recorder.losses.add(Loss(reason))
        self._thread = threading.Thread(
            target=self._recorder.work, args=(self._queue,), name="torchtap-writer", daemon=True
        )
        self._thread.start()

    @property
    def attempt(self) -> int:
        """Return the number of this attempt at the run: 0 for the first."""
        return self._recorder.attempt

    @property
    def lost(self) -> list[str]:
        """Return what could not be kept, in sentences; empty if nothing was lost."""
        return self._recorder.losses.sentences()

    @property
    def waited(self) -> float:
        """Return the seconds for which ``write`` has blocked its callers."""
        return self._queue.waited

    def write(self, record: StepRecord) -> None:
        """Record one step."""
        if self._process != os.getpid():
            return  # a forked child, such as a data loader's worker, does not record
        if self._closed:
            raise SessionError(f"the run in {self.folder} is closed: make a new RunWriter to record more")
        if self._strict:
            self._raise_if_lost()
        self._queue.put(record)

    def event(self, kind: str, **facts: object) -> None:
        """Note an event, as JSON."""
        if self._process == os.getpid():
            self._recorder.note(kind, facts)

    def alert(self, level: str, title: str, text: str, step: int | None, site: str | None) -> None:
        """Keep the records around the step of an alert when older ones are thinned out."""
        if step is not None and self._process == os.getpid():
            self._recorder.keep_near(step)

    def update_manifest(self, **changes: object) -> None:
        """Replace top-level fields of the manifest, such as ``sites`` once their order is known."""
        if self._process == os.getpid():
            self._recorder.change_manifest(changes)

    def flush(self) -> None:
        """Return when everything written so far is on disk and visible to readers."""
        if self._closed or self._process != os.getpid():
            return
        self._wait(Barrier())
        if self._strict:
            self._raise_if_lost()

    def close(self) -> None:
        """Flush, mark the run as complete, and end the thread. Further calls do nothing."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        _open_writers.discard(self)
        self._wait(Barrier(last=True))
        self._thread.join()
        if self._strict:
            self._raise_if_lost()

    def _wait(self, barrier: Barrier) -> None:
        self._queue.put_barrier(barrier)
        while not barrier.done.wait(1.0):
            if not self._thread.is_alive():  # only at interpreter shutdown
                return

    def _raise_if_lost(self) -> None:
        if self._recorder.losses:
            raise RecordingLostError("; ".join(self.lost))

    @property
    def part(self) -> tuple[str, int, int]:
        """Return the folder, the rank and the process that it records."""
        return self.folder, self._rank, self._process

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_open_writers: weakref.WeakSet[RunWriter] = weakref.WeakSet()
_registering = threading.Lock()


def _register(writer: RunWriter) -> None:
    """Count a writer among the open ones. Raise if another one of this process records the same part."""
    with _registering:
        if any(other.part == writer.part for other in list(_open_writers)):
            folder, rank, _ = writer.part
            raise SessionError(
                f"this process already records rank {rank} into {folder}: close that recording first, or give this "
                "one a folder of its own"
            )
        _open_writers.add(writer)


def _place(folder: str, rank: int, world: int, pack: tuple[int, int] | None) -> Destination:
    if "://" in folder:
        from torchtap.store.files.remote import RemoteDestination

        return RemoteDestination(folder, rank)
    with suppress(OSError):  # a fold of what was recorded before does not have what comes now
        os.unlink(os.path.join(folder, LAUNCHES))
    if pack is None and world >= _PACKED_FROM:
        pack = node_ranks(rank)
    if pack is None or not has_numbered_locks():
        return LocalDestination(folder, rank)
    return PackDestination(folder, rank, pack, launch_digest())


@atexit.register
def _close_all() -> None:
    for writer in list(_open_writers):
        writer.close()


@final
class _Recorder:
    """Everything between the queue and the files. `work` runs in one thread; any thread may call `note`."""

    def __init__(
        self, manifest: Mapping[str, Any], rank: int, world: int, flush_seconds: float, disk: int | None
    ) -> None:
        self.losses = Losses()
        self._manifest: dict[str, Any] = {
            "check": UNSEALED,  # first, as `seal` requires
            "format": {"name": FORMAT_NAME, "version": FORMAT_VERSION},
            **{name: value for name, value in manifest.items() if name not in _RESERVED},
            "rank": rank,
            "world": world,
            "launch": launch_facts(),
        }
        if disk is not None:
            self._manifest["disk_limit"] = disk
        self._manifest.setdefault("created", datetime.now(UTC).isoformat())
        self._flush_seconds = flush_seconds
        self._limit = disk
        self._lock = threading.Lock()
        self._event_lines = EventLines()
        self._manifest_changed = False
        self._oldest = 0.0  # arrival of the oldest record that is not visible yet
        self._synced = time.monotonic()
        self._records = 0  # that were written
        self._thinner: Thinner | None = None
        self._place: Destination | None = None

    @property
    def attempt(self) -> int:
        return 0 if self._place is None else self._place.part[1]

    def begin(self, place: Destination, segment_bytes: int, compressor: Compressor | None) -> None:
        """Write the manifest into a fresh attempt. From then on the run exists."""
        self._manifest["attempt"] = place.part[1]
        self._manifest[RUN_ID] = place.run_id
        if self._manifest["world"] > 1:
            # Small, so that a reader of thousands of ranks can group them.
            names = ("rank", "world", "attempt", "created", "launch", RUN_ID)
            facts = {"check": UNSEALED, **{name: self._manifest[name] for name in names}}
            place.put(LAUNCH, [seal(json.dumps(facts).encode())])
        place.put(MANIFEST, [self._manifest_bytes()])
        self._segment_bytes = segment_bytes
        self._numbers, self._items = ScalarItems(ordered=self._limit is not None), TensorItems(compressor)
        noticed = {}
        if self._limit is not None:
            self._thinner = Thinner(place, self._limit, self._numbers)
            noticed["appeared"] = self._thinner.appeared
        self._scalars = Segments(place, self._numbers, **noticed)
        self._tensors = Segments(place, self._items, **noticed)
        self._events = Segments(place, self._event_lines, **noticed)
        self._place = place

    def _manifest_bytes(self) -> bytes:
        return seal(json.dumps(self._manifest, indent=1, default=str).encode())

    def note(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Add an event."""
        event = {"check": UNSEALED, "kind": kind, "time": time.time(), **facts}
        if self._place is not None:
            event[EVENT_RUN_ID] = self._place.run_id
        line = seal(json.dumps(event, separators=(",", ":"), default=str).encode())
        self._event_lines.append(line)

    def keep_near(self, step: int) -> None:
        """Keep the records around a step when older ones are thinned out."""
        if self._thinner is not None:
            self._thinner.keep_near(step)

    def change_manifest(self, changes: Mapping[str, Any]) -> None:
        """Replace fields of the manifest."""
        with self._lock:
            kept = {name: value for name, value in changes.items() if name not in _RESERVED}
            self._manifest = {**self._manifest, **kept}
            self._manifest_changed = True

    def work(self, queue: RecordQueue) -> None:
        """Run the thread. End after the last barrier."""
        while True:
            items = queue.take(self._flush_seconds / 4)
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

    def _guarded(self, action: Callable[..., bool | None], *arguments: Any) -> bool | None:
        # The thread must survive every error, ours included: the training waits for it.
        try:
            return action(*arguments)
        except Exception as error:
            self.losses.add(Loss(f"{type(error).__name__}: {error}"))
            return None

    def _gather(self, record: StepRecord) -> None:
        if self._place is None:
            reason = "the run's folder could not be made"
            self.losses.add(Loss(reason, tensors=len(record.tensors), rows=bool(record.scalars)))
            return
        if not self._scalars.pending:
            self._oldest = time.monotonic()
        # Tensors belong to a record only once its clock is written, so a refused record leaves nothing.
        self._numbers.add(record)
        if record.tensors and self._thinner is not None:
            self._thinner.with_tensors.add(record.step)
        for item in record.tensors:
            try:
                self._items.add(record.step, item, record.phase)
            except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
                self._count(Loss(f"{item.site} could not be stored: {error}", tensors=1))
            if self._tensors.pending_bytes >= self._segment_bytes or self._tensors.pending >= _MOST_ENTRIES:
                self._put_tensors()

    def _put_tensors(self) -> None:
        try:
            self._tensors.flush()
        except (OSError, ValueError) as error:
            tensors = self._items.tensors(self._items.count - self._tensors.pending)
            reason = str(getattr(error, "strerror", None) or error)
            loss = Loss(reason, tensors, nbytes=self._tensors.pending_bytes)
            self._tensors.discard()
            self._count(loss)

    def _count(self, loss: Loss | None) -> None:
        if loss is not None:
            self.losses.add(loss)
            self.note("lost", {"reason": loss.reason, "tensors": loss.tensors, "rows": loss.rows})

    def _due(self) -> bool:
        if self._place is None:
            return False
        if self._scalars.pending:
            full = self._scalars.pending_bytes >= _FLUSH_BYTES
            return full or time.monotonic() - self._oldest >= self._flush_seconds
        return bool(self._events.pending) or self._manifest_changed

    def _flush(self, queue: RecordQueue) -> None:
        place = self._place
        if place is None:
            return
        dropped = queue.dropped()
        if dropped.steps:
            loss = Loss(
                "the disk was slower than the training", dropped.tensors, dropped.rows, dropped.nbytes
            )
            self.losses.add(loss)
            facts = {"reason": loss.reason, "tensors": loss.tensors, "rows": loss.rows, "bytes": loss.nbytes}
            self.note("lost", {**facts, "steps": [dropped.first, dropped.last]})
        if self._scalars.pending:
            self._put_tensors()
            self._put_events(place)  # events before a step are visible when the step is
            self._put_scalars()
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                self._synced = time.monotonic()
                place.sync(("scalars", MANIFEST))
        self._put_events(place)
        if self._thinner is not None and self._thinner.due:
            self._scalars.release()
            self._thinner.thin()

    def _put_scalars(self) -> None:
        pending = self._scalars.pending
        try:
            self._scalars.flush()
        except OSError as error:
            if self._scalars.pending_bytes > _KEPT_BYTES:
                self._count(Loss(error.strerror or str(error), rows=pending))
                self._scalars.discard()
            else:
                self._oldest = time.monotonic()
                self.losses.add(Loss(f"numbers wait for the disk: {error.strerror or error}"))
            return
        self._records += pending

    def _put_events(self, place: Destination) -> None:
        try:
            with self._lock:
                changed, self._manifest_changed = self._manifest_changed, False
                manifest = self._manifest_bytes() if changed else b""
            if changed:
                place.put(MANIFEST, [manifest])
            changed = False
            self._events.flush()
        except OSError as error:
            self._manifest_changed |= changed
            if self._events.pending > _MOST_EVENTS:
                self._events.discard()
            self.losses.add(Loss(f"events wait for the disk: {error.strerror or error}"))

    def _closing(self, place: Destination) -> bytes:
        """Return the note that a reader can check the files against."""
        facts = {
            "check": UNSEALED,
            "time": time.time(),
            "rank": place.part[0],
            "attempt": place.part[1],
            RUN_ID: place.run_id,
            "records": self._records,
            "flushes": {"tensors": self._tensors.flushes, "events": self._events.flushes},
            "lost": self.losses.facts(),
        }
        return seal(json.dumps(facts, indent=1).encode())

    def _barrier(self, queue: RecordQueue, last: bool) -> None:
        place = self._place
        if place is None:
            return
        self._flush(queue)
        if last:
            if self._scalars.pending:  # the disk refused them to the end
                self._count(Loss("the disk took no more numbers", rows=self._scalars.pending))
            self._put_events(place)
            for segments in (self._tensors, self._events, self._scalars):
                with suppress(OSError):  # the small files stay
                    segments.finish()
            try:
                place.put(CLOSED, [self._closing(place)])
            except OSError as error:
                self.losses.add(Loss(f"the run could not be closed: {error.strerror or error}"))
        try:
            place.sync()
        except OSError as error:
            self.losses.add(Loss(f"what was written may not be safe on disk: {error.strerror or error}"))
        if last:
            place.release()
