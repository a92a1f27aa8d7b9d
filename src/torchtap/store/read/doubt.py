"""Steps that a later attempt recorded again, but whose records there are damaged: an earlier attempt's do not count.

An earlier attempt still has values of such steps. They are not what the run says, so asking for them is an error, or
gives NaN where the caller wants what there is (``partial=True``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunCorruptError

__all__ = ["Ranges", "doubt_about", "in_doubt", "inside", "joined"]

Ranges = Sequence[tuple[int, int]]


def in_doubt(steps: Sequence[npt.NDArray[np.int64]], lost: Sequence[Ranges]) -> npt.NDArray[np.bool_]:
    """Of every attempt's records, one after the other: whether a later attempt has lost that step."""
    marks: list[npt.NDArray[np.bool_]] = []
    later: list[tuple[int, int]] = []
    for own, ranges in zip(reversed(steps), reversed(lost), strict=True):
        marks.append(inside(own, later))
        if ranges:
            later = joined([*later, *ranges])
    return np.concatenate([np.zeros(0, bool), *reversed(marks)])


def inside(steps: npt.NDArray[np.int64], ranges: Ranges) -> npt.NDArray[np.bool_]:
    """Which of the steps lie in one of the ranges, which are ascending and do not overlap."""
    if not ranges or not len(steps):
        return np.zeros(len(steps), bool)
    lows = np.array([low for low, _ in ranges], np.int64)
    highs = np.array([high for _, high in ranges], np.int64)
    at = np.searchsorted(lows, steps, side="right") - 1
    found: npt.NDArray[np.bool_] = (at >= 0) & (steps <= highs[np.maximum(at, 0)])
    return found


def joined(ranges: Ranges) -> list[tuple[int, int]]:
    """The same steps in ranges that do not overlap, ascending."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        elif low <= high:
            found.append((low, high))
    return found


def doubt_about(steps: npt.NDArray[np.int64]) -> RunCorruptError:
    """The error for steps that are in doubt."""
    named = ", ".join(str(step) for step in np.unique(steps)[:5].tolist())
    more = " ..." if len(np.unique(steps)) > 5 else ""
    return RunCorruptError(
        f"a later attempt recorded step {named}{more} again, and its file is damaged or missing; an earlier attempt's "
        "values are there, but they are not what the run ended with. partial=True gives NaN for them, "
        "tt.open(path, attempt=...) shows one attempt alone, and run.problems names the files"
    )
