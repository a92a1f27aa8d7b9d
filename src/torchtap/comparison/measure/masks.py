"""Attention masks in two spellings: booleans, and numbers that are added to the scores.

The same mask is ``True``/``False`` for one kernel and ``0``/``-inf`` (or `finfo.min`, or -10000) for another. Which of
the two a boolean means by ``True``, "look here" or "do not", is not written in it: both are tried.
"""

from __future__ import annotations

import numpy as np

from torchtap.comparison.measure.values import Array

__all__ = ["same_spelling"]

_FORBIDS = -9000.0  # the mildest number that was seen to stand for "do not look"


def same_spelling(left: Array, right: Array) -> tuple[Array, Array]:
    """Two values of one shape; where one is a boolean and the other an additive mask, both as additive masks."""
    if left.dtype == np.bool_ and right.dtype.kind == "f":
        return _spelled_like(left, right)
    if right.dtype == np.bool_ and left.dtype.kind == "f":
        additive, spelled = _spelled_like(right, left)
        return spelled, additive
    return left, right


def _spelled_like(booleans: Array, numbers: Array) -> tuple[Array, Array]:
    forbidden = numbers <= _FORBIDS
    if booleans.shape != numbers.shape or not forbidden.any() or not (forbidden | (numbers == 0)).all():
        return booleans, numbers
    hidden = booleans if np.array_equal(booleans, forbidden) else ~booleans
    return np.where(hidden, -np.inf, 0.0), np.where(forbidden, -np.inf, 0.0)
