"""Checksums of large buffers beside writing them: reading memory twice at once takes the time of once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

from torchtap.store.checksum import checksum

__all__ = ["ChecksumThread"]

_SMALL = 128 << 10  # below this, handing over costs more than the checksum


@final
class ChecksumThread:
    """One thread that computes checksums in the order in which they are asked for."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[memoryview, SimpleQueue[int]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, buffer: memoryview) -> Callable[[], int]:
        """Begin; the answer is called when the checksum is needed, once."""
        if len(buffer) < _SMALL:
            value = checksum(buffer)
            return lambda: value
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchtap-checksums", daemon=True)
            self._thread.start()
        answer: SimpleQueue[int] = SimpleQueue()
        self._work.put((buffer, answer))
        return answer.get

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            buffer, answer = task
            answer.put(checksum(buffer))
            del task, buffer, answer  # the buffer's memory must not wait here for the next task

    def close(self) -> None:
        """End the thread, after what was asked for."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
