"""Conditions over windows of columns, for rules: since when has something held long enough?"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

__all__ = ["LAST", "first_run", "first_run_of", "last_known", "median_of_columns", "rises_steadily"]

LAST = 24  # columns that a rule looks back; a chart is judged at least every eight

Flags = npt.NDArray[np.bool_]


def first_run(holds: Flags, length: int) -> int | None:
    """The column at which a condition had held ``length`` times in a row for the first time."""
    if len(holds) < length:
        return None
    run = np.convolve(holds.astype(np.int64), np.ones(length, np.int64), "valid")
    ends = np.flatnonzero(run == length)
    return int(ends[0]) + length - 1 if len(ends) else None


def first_run_of(holds: Flags, there: Flags, length: int) -> int | None:
    """The same for what is not recorded in every column: ``length`` times in a row of those in which it is."""
    columns = np.flatnonzero(there)
    at = first_run(holds[columns], length)
    return None if at is None else int(columns[at])


def last_known(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each number that is missing is the last one before it."""
    there = ~np.isnan(values)
    before = np.maximum.accumulate(np.where(there, np.arange(len(values)), 0))
    return np.asarray(values[before], np.float64)


def median_of_columns(values: np.ndarray) -> npt.NDArray[np.float64]:
    """The median over the rows of each column, of what is finite; NaN where nothing is."""
    if not values.shape[0]:
        return np.full(values.shape[1], np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(np.where(np.isfinite(values), values, np.nan), axis=0), np.float64)


def rises_steadily(values: np.ndarray, share: float = 0.75) -> bool:
    """Whether most of a window's thirds lie above the one before, and the end above everything at the start."""
    if len(values) < 9:
        return False
    thirds = np.array_split(values, 9)
    means = np.array([third.mean() for third in thirds])
    return bool((np.diff(means) > 0).mean() >= share)
