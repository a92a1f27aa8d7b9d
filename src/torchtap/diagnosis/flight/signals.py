"""Who else may ask for a dump: a signal, a file in the folder, an exception that nobody caught.

Nothing happens in a signal handler but a note; what others have installed is called as before, and put back at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import final

__all__ = ["Asked", "Uncaught"]

ASKING = "dump"  # a file of this name in the recorder's folder asks for a dump


@final
class Asked:
    """Notes that a dump was asked for, by a signal or by a file."""

    def __init__(self, folder: Path, number: int | None) -> None:
        self._folder = folder
        self._seen = 0
        self._signalled = False
        self._number = number if threading.current_thread() is threading.main_thread() else None
        if self._number is not None:
            self._before = signal.getsignal(self._number)
            signal.signal(self._number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> object:
        self._signalled = True
        if callable(self._before):
            return self._before(number, frame)
        return None

    def by_signal(self) -> bool:
        """Whether the signal came since the last time."""
        came, self._signalled = self._signalled, False
        return came

    def folder_changed(self) -> bool:
        """Whether anything came into the folder since the last time: a request, or another rank's incident."""
        try:
            now = os.stat(self._folder).st_mtime_ns
        except OSError:
            return False
        changed, self._seen = now != self._seen, now
        return changed

    def by_file(self) -> bool:
        """Whether the file is there; it is taken away."""
        try:
            (self._folder / ASKING).unlink()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """Leave the signal to whom it belonged."""
        if self._number is not None and signal.getsignal(self._number) == self._on_signal:
            signal.signal(self._number, self._before)


@final
class Uncaught:
    """Tells of an exception that ends the program, before it does."""

    def __init__(self, tell: Callable[[BaseException], None]) -> None:
        self._tell = tell
        self._before = sys.excepthook
        self._hook = self._on_exception  # one bound method, to be recognised again
        sys.excepthook = self._hook

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._tell(error)
        self._before(kind, error, trace)

    def stop(self) -> None:
        """Back to what was there, unless others came after us."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._before
