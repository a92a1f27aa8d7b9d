"""Record a run: `RunWriter` takes records from the training and leaves segments in a folder.

It guarantees:
- ``write`` only hands the record to a thread of its own; no tensor is copied and no file touched by the
  caller;
- nothing is ever written over: a folder that has a run gets a further attempt beside it;
- a step becomes visible as a whole, at most about `FLUSH_SECONDS` after it was written;
- after ``flush`` everything written so far is on disk, also if the power fails;
- no failure of the disk reaches the caller, unless ``strict``: what was lost is counted, told once as a
  warning, listed in ``lost`` and, if that can still be written, noted in the run.

Not here: the thread's work (`recorder`), bytes (`scalars`, `tensors`), the bound (`pressure`).
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import final

from torchtap.errors import RecordingLostError, SessionError
from torchtap.store.files.destination import Destination, LocalDestination
from torchtap.store.format.compress import make_compressor
from torchtap.store.record import StepRecord
from torchtap.store.write.pressure import Barrier, Pressure, RecordQueue
from torchtap.store.write.recorder import FLUSH_SECONDS, RunRecorder
from torchtap.store.write.tensors import Loss

__all__ = ["RunWriter"]

_open_writers: weakref.WeakSet[RunWriter] = weakref.WeakSet()


@final
class RunWriter:
    """Write one rank's part of a run. One process, any number of threads."""

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
    ) -> None:
        self._strict = strict
        self._queue = RecordQueue(queue_bytes, on_pressure)
        self._closed = False
        self._process = os.getpid()
        self._recorder = RunRecorder(
            manifest=manifest,
            rank=rank,
            world=world,
            flush_seconds=flush_seconds,
            segment_bytes=segment_bytes,
            compressor=make_compressor(compress),
        )
        self.folder = os.fspath(folder)
        try:
            self._recorder.begin(_place(self.folder, rank))
        except OSError as error:
            reason = f"nothing is recorded: cannot begin a run in {self.folder}: {error.strerror or error}"
            if strict:
                raise RecordingLostError(reason) from error
            self._recorder.losses.add(Loss(reason))
        self._thread = threading.Thread(
            target=self._recorder.work, args=(self._queue,), name="torchtap-writer", daemon=True
        )
        self._thread.start()
        _open_writers.add(self)

    @property
    def attempt(self) -> int:
        """Which attempt at this run this is: 0 for the first."""
        return self._recorder.attempt

    @property
    def lost(self) -> list[str]:
        """What could not be kept, in sentences; empty when all went well."""
        return self._recorder.losses.sentences()

    @property
    def waited(self) -> float:
        """Seconds that ``write`` has kept its callers waiting for the disk."""
        return self._queue.waited

    def write(self, record: StepRecord) -> None:
        """Take one step."""
        if self._closed or self._process != os.getpid():
            if self._closed:
                raise SessionError(f"the run in {self.folder} is closed: make a new RunWriter to record more")
            return  # a forked child, such as a data loader's worker, is not who records
        if self._strict:
            self._raise_if_lost()
        self._queue.put(record)

    def event(self, kind: str, **facts: object) -> None:
        """Note something that happened, as JSON."""
        if self._process == os.getpid():
            self._recorder.note(kind, facts)

    def update_manifest(self, **changes: object) -> None:
        """Replace top-level fields of the manifest, such as ``sites`` once their order is known."""
        if self._process == os.getpid():
            self._recorder.change_manifest(changes)

    def flush(self) -> None:
        """Return when everything written so far is on disk and visible to readers."""
        if self._closed or self._process != os.getpid():
            return
        barrier = Barrier()
        self._queue.put_barrier(barrier)
        self._wait(barrier)
        if self._strict:
            self._raise_if_lost()

    def close(self) -> None:
        """Flush, mark the run as complete, and end the thread. Further calls do nothing."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        _open_writers.discard(self)
        barrier = Barrier(last=True)
        self._queue.put_barrier(barrier)
        self._wait(barrier)
        self._thread.join()
        if self._strict:
            self._raise_if_lost()

    def _wait(self, barrier: Barrier) -> None:
        while not barrier.done.wait(1.0):
            if not self._thread.is_alive():  # only at interpreter shutdown
                return

    def _raise_if_lost(self) -> None:
        if self._recorder.losses:
            raise RecordingLostError("; ".join(self.lost))

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _place(folder: str, rank: int) -> Destination:
    if "://" in folder:
        from torchtap.store.files.remote import RemoteDestination

        return RemoteDestination(folder, rank)
    return LocalDestination(folder, rank)


@atexit.register
def _close_all() -> None:
    for writer in list(_open_writers):
        writer.close()
