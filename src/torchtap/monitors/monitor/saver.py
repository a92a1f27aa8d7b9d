"""A thread that writes files in the order it was told to, so that a training need not wait for the disk."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from typing import final

__all__ = ["Saver"]


@final
class Saver:
    """Does jobs one after another in the background. A job that fails is noted and the next one is done."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._waiting = 0
        self._pending_bytes = 0
        self._failures: list[str] = []
        self._thread: threading.Thread | None = None

    @property
    def pending_bytes(self) -> int:
        """How much memory the jobs that are not done yet keep."""
        return self._pending_bytes

    def submit(self, job: Callable[[], None], nbytes: int = 0) -> None:
        """Do this after everything that was submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="torchtap-monitor-saver", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a script that ends without waiting has its files all the same
        with self._changed:
            self._waiting += 1
            self._pending_bytes += nbytes
        self._jobs.put((job, nbytes))

    def wait_below(self, nbytes: int) -> None:
        """Until the pending jobs keep no more than this."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending_bytes <= nbytes)

    def flush(self) -> None:
        """Until every job is done; then report what failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == 0)
            failures, self._failures = self._failures, []
        for failure in failures:
            self._on_failure(failure)

    def close(self) -> None:
        """Finish, and let the thread go; a later job starts another."""
        try:
            self.flush()
        finally:
            atexit.unregister(self.close)
            if self._thread is not None:
                self._jobs.put(None)
                self._thread.join()
                self._thread = None

    def _work(self) -> None:
        while (told := self._jobs.get()) is not None:
            job, nbytes = told
            failure = None
            try:
                job()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            del told, job  # what the job kept in memory is free before anyone is told that it is done
            with self._changed:
                if failure is not None:
                    self._failures.append(failure)
                self._waiting -= 1
                self._pending_bytes -= nbytes
                self._changed.notify_all()
