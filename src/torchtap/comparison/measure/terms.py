"""Name a difference that is made of something else that was recorded: a term that is missing or comes twice, or one
that only hidden positions have.

A residual that was forgotten leaves a value that differs from the reference's by exactly the module's input; a bias
that was dropped, by the bias in every row. Not here: relations of two values alone (`patterns`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from torchtap.comparison.measure.dtypes import resolution
from torchtap.comparison.measure.values import Comparable, Value, value_of

__all__ = ["MOST", "differing_term", "hidden_only"]

MOST = 1 << 22  # elements; larger values have no relation looked for
_LEFT_OVER = 1e-3  # of the difference that a term may leave unexplained
_WHOLE = 1e-3  # how near to once a term has to be to be called the term itself

Wide = npt.NDArray[np.float64]


def differing_term(reference: Comparable, target: Comparable, terms: Iterable[tuple[str, Comparable]]) -> str:
    """Which of the terms, times a constant, is the whole difference, in words; empty when none is."""
    two = _difference(reference, target)
    if two is None:
        return ""
    difference, rounding = two
    size = float(np.linalg.norm(difference))
    allowed = min(max(_LEFT_OVER * size, rounding), 0.05 * size)
    for name, term in terms:
        part = _spread(value_of(term), difference.shape)
        square = 0.0 if part is None else float((part * part).sum())
        if part is None or not 0.0 < square < math.inf:
            continue
        times = float((difference * part).sum()) / square
        if float(np.linalg.norm(difference - times * part)) <= allowed:
            return _named(name, times)
    return ""


def hidden_only(reference: Comparable, target: Comparable, masks: Iterable[tuple[str, Comparable]]) -> str:
    """Whether the two differ only at positions that one of the masks hides, in words."""
    two = _difference(reference, target)
    if two is None:
        return ""
    for name, mask in masks:
        shown = value_of(mask).array
        if shown.ndim != 2 or two[0].shape[:2] != shown.shape or shown.all() or not shown.any():
            continue
        if not np.isin(shown, (0, 1)).all():
            continue
        if not two[0][shown.astype(bool)].any():
            return f"wrong only at positions that `{name}` hides"
    return ""


def _difference(reference: Comparable, target: Comparable) -> tuple[Wide, float] | None:
    """Target less reference, flat axes kept, and what rounding may do to it."""
    if tuple(reference.shape) != tuple(target.shape) or not 1 < math.prod(reference.shape) <= MOST:
        return None
    mine, theirs = value_of(reference), value_of(target)
    if mine.is_complex or theirs.is_complex:
        return None
    r, t = mine.wide(), theirs.wide()
    with np.errstate(invalid="ignore", over="ignore"):
        difference = t - r
    if not np.isfinite(difference).all() or not difference.any():
        return None
    step = max(resolution(mine.dtype), resolution(theirs.dtype))
    return difference, 4 * step * float(np.linalg.norm(r))


def _spread(term: Value, shape: tuple[int, ...]) -> Wide | None:
    """A term in the shape of the difference; a vector in the last axis, or in the channels of a picture."""
    wide = term.wide() if not term.is_complex else None
    if wide is None or not np.isfinite(wide).all():
        return None
    if wide.shape == shape:
        return wide
    if wide.ndim != 1 or len(shape) < 2:
        return None
    if shape[-1] == wide.size:
        return np.broadcast_to(wide, shape)
    if len(shape) > 2 and shape[1] == wide.size:
        return np.broadcast_to(wide.reshape(-1, *[1] * (len(shape) - 2)), shape)
    return None


def _named(name: str, times: float) -> str:
    if abs(times + 1.0) < _WHOLE:
        return f"the reference's without `{name}`"
    if abs(times - 1.0) < _WHOLE:
        return f"the reference's with `{name}` added once more"
    return f"the reference's {'+' if times > 0 else '−'} {abs(times):.3g} × `{name}`"
