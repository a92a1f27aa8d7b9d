"""A bound on the time of one attack: loops ask it and stop, and the table says how far they came."""

from __future__ import annotations

import time

__all__ = ["begin", "over"]

_end: float | None = None


def begin(seconds: float | None) -> None:
    """From now on so many seconds are left; without a number, as many as it takes."""
    global _end
    _end = None if seconds is None else time.monotonic() + seconds


def over() -> bool:
    """Whether they are used up."""
    return _end is not None and time.monotonic() > _end
