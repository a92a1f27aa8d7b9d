"""Which steps a folder holds already, from the names of its files alone."""

from __future__ import annotations

import os

from torchtap.store.files.layout import attempt_folder, parse_attempt, parse_segment, rank_folder
from torchtap.store.files.opening import folder_of

__all__ = ["recorded_steps"]


def recorded_steps(run: str | os.PathLike[str], rank: int) -> range:
    """From the first to the last step that earlier attempts of a rank have recorded; empty where there are none.

    A folder that cannot be read holds none as far as anyone can tell; writing to it will say more.
    """
    path = os.fspath(run)
    try:
        part = folder_of(path).child(rank_folder(rank))
        attempts = [number for name in part.names() if (number := parse_attempt(name)) is not None]
        found = [
            segment
            for number in attempts
            for name in part.child(attempt_folder(number)).names()
            if (segment := parse_segment(name)) is not None and segment.kind == "scalars"
        ]
    except OSError:
        return range(0)
    if not found:
        return range(0)
    return range(min(segment.low for segment in found), max(segment.high for segment in found) + 1)
