"""Report how far a long computation has come. Silent unless a caller asked for it.

A loop reports with `tracked`, a single call with `note`. `showing` chooses for a block who is told: a bar on a
terminal or in a notebook (``progress=True``), a function ``(what, done, total)``, or nobody. It guarantees:
- without a listener a report costs one look-up;
- a bar appears after `_DELAY` seconds, on standard error, and never in a pipe or a file;
- the bar is removed when the block ends, also by an error or Ctrl-C.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias, TypeVar, final

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Bar", "Listener", "count", "note", "showing", "tracked"]

T = TypeVar("T")
Listener: TypeAlias = Callable[[str, int, "int | None"], object]

_DELAY = 0.7  # seconds
_OFTEN = 0.05  # seconds between two reports of one loop

_listener: ContextVar[Listener | None] = ContextVar("torchtap_progress", default=None)
_counts: ContextVar[dict[str, int]] = ContextVar("torchtap_progress_counts")


def note(what: str, done: int = 0, total: int | None = None) -> None:
    """Report that ``done`` of ``total`` parts of ``what`` are finished."""
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total)


def count(what: str) -> None:
    """Report one more part of ``what``, of a number that is not known in advance."""
    if _listener.get() is not None:
        counts = _counts.get()
        counts[what] = counts.get(what, 0) + 1
        note(what, counts[what])


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield ``items`` and report how many are finished. ``total`` defaults to their number, if it is known."""
    if _listener.get() is None:
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    told = 0.0
    done = 0
    for item in items:
        if (now := time.monotonic()) - told > _OFTEN:
            note(what, done, total)
            told = now
        yield item
        done += 1
    note(what, done, total)


@contextmanager
def showing(progress: bool | Listener | None) -> Iterator[None]:
    """Report to ``progress`` in this block: True shows a bar, False nothing, None whatever was chosen outside."""
    if progress is None:
        yield
        return
    bar = Bar() if progress is True else progress if isinstance(progress, Bar) else None
    counts = _counts.set({})
    token = _listener.set(bar if bar is not None else progress or None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        _listener.reset(token)
        _counts.reset(counts)
        if bar is not None:
            bar.close()


@final
class Bar:
    """A bar for each part of the work: what is done, how much of it, and the time left."""

    def __init__(self) -> None:
        from torchtap.terminal import Terminal

        console = Terminal(stderr=True)
        self._console = console if console.is_terminal or console.is_jupyter else None
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began = time.monotonic()
        self.last: tuple[str, int, int | None] | None = None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        self.last = (what, done, total)
        if self._console is None or time.monotonic() - self._began < _DELAY:
            return
        bars = self._bars if self._bars is not None else self._open()
        if what not in self._tasks:
            for task in self._tasks.values():
                bars.stop_task(task)
            self._tasks[what] = bars.add_task(what, total=total)
        bars.update(self._tasks[what], completed=done, total=total)

    def _open(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._bars.start()
        return self._bars

    def close(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __str__(self) -> str:
        if self.last is None:
            return ""
        what, done, total = self.last
        return f"{what}, {done:,} of {total:,}" if total else f"{what}, {done:,}" if done else what
