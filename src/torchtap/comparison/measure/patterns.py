"""Name the exact relation of two values where there is one: a constant factor, a transpose, rows in another order.

A relation is named only when it explains the whole difference: what is left is no more than rounding. The first
that fits is named; a value that fits none has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.comparison.measure.dtypes import resolution
from torchtap.comparison.measure.terms import MOST
from torchtap.comparison.measure.values import Comparable, value_of

__all__ = ["factor", "pattern"]

_LEFT_OVER = 1e-3  # of the difference that a relation may leave unexplained
_MOST_ROWS = 4096

Wide = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Two:
    """Both sides in float64, and how much of their difference may stay unexplained."""

    r: Wide
    t: Wide
    allowed: float
    digits: int  # of a constant that are worth telling

    def explained_by(self, other: Wide) -> bool:
        """Whether the target is this, up to rounding."""
        return other.shape == self.t.shape and _norm(self.t - other) <= self.allowed


def pattern(reference: Comparable, target: Comparable) -> str:
    """How the target follows from the reference, in words; empty when no relation is exact."""
    if tuple(reference.shape) != tuple(target.shape) or not 1 < math.prod(reference.shape) <= MOST:
        return ""
    mine, theirs = value_of(reference), value_of(target)
    step = max(resolution(mine.dtype), resolution(theirs.dtype))
    two = _two(mine.wide(), theirs.wide(), step)
    if two is None:
        return ""
    return _zero(two) or _scaled(two) or _rearranged(two) or _partly(two)


def _two(r: Wide, t: Wide, step: float) -> _Two | None:
    """Two finite values that differ, with what a relation may leave unexplained; else None."""
    if r.shape != t.shape or not (np.isfinite(r).all() and np.isfinite(t).all()):
        return None
    difference, size = _norm(t - r), _norm(r)
    if not (0.0 < difference < math.inf and 0.0 < size < math.inf):
        return None
    rounding = 4 * step * size
    allowed = min(max(_LEFT_OVER * difference, rounding), 0.05 * difference)
    return _Two(r, t, allowed, 3 if step > 1e-4 else 4)


def _zero(two: _Two) -> str:
    return "" if two.t.any() else "all zero"


def factor(reference: Wide, target: Wide) -> tuple[float, float]:
    """``(c, what is left)``: the constant for which c x reference is nearest, and the relative distance left then."""
    r, t = reference.reshape(-1), target.reshape(-1)
    size = float(r @ r)
    if size == 0.0:
        return math.nan, math.inf
    constant = float(t @ r) / size
    whole = _norm(t)
    return constant, _norm(t - constant * r) / whole if whole else math.inf


def _norm(value: Wide) -> float:
    return float(np.linalg.norm(value.reshape(-1)))


def _scaled(two: _Two) -> str:
    r, t = two.r, two.t
    constant = float((t * r).sum()) / float((r * r).sum())
    if two.explained_by(constant * r):
        if abs(constant + 1.0) < 1e-6:
            return "the reference's with the sign flipped"
        return f"{constant:.{two.digits}g} × the reference's"
    shift = float((t - r).mean())
    if two.explained_by(r + shift):
        return f"the reference's {'+' if shift >= 0 else '−'} {abs(shift):.{two.digits}g}"
    return ""


def _rearranged(two: _Two) -> str:
    along = (_along(two, axis) for axis in range(two.r.ndim) if two.r.shape[axis] > 1)
    return _transposed(two) or next((named for named in along if named), "")


def _transposed(two: _Two) -> str:
    r = two.r
    if r.ndim < 2:
        return ""
    turned = r.swapaxes(-1, -2)
    if r.shape[-1] == r.shape[-2]:
        return "the reference's transposed" if two.explained_by(turned) else ""
    if two.explained_by(turned.reshape(r.shape)):
        return "the reference's transposed, read in the wrong layout"
    return ""


def _along(two: _Two, axis: int) -> str:
    """What was done to the order of one axis."""
    if two.explained_by(np.flip(two.r, axis)):
        return f"the reference's reversed along axis {axis}"
    if any(_shifted(two, axis, by) for by in (1, -1)):
        return f"the reference's shifted by one along axis {axis}"
    return _reordered(two, axis)


def _shifted(two: _Two, axis: int, by: int) -> bool:
    """Also when what was pushed over the edge is gone: then all but one position follow."""
    rolled = np.roll(two.r, by, axis)
    if two.explained_by(rolled):
        return True
    if two.r.shape[axis] < 4:
        return False
    edge: list[slice | int] = [slice(None)] * rolled.ndim
    edge[axis] = 0 if by > 0 else -1
    rolled[tuple(edge)] = two.t[tuple(edge)]
    return two.explained_by(rolled)


def _reordered(two: _Two, axis: int) -> str:
    """The same slices in another order, or fewer slices repeated."""
    count = two.r.shape[axis]
    if count > _MOST_ROWS:
        return ""
    turned = np.moveaxis(two.r, axis, 0)
    left, right = turned.reshape(count, -1), np.moveaxis(two.t, axis, 0).reshape(count, -1)
    if left.shape[1] < 2:
        return ""
    # The nearest slice of the reference, by |l - r|^2 less what all candidates share.
    nearest = ((left * left).sum(1)[None] - 2.0 * (right @ left.T)).argmin(1)
    moved = int((nearest != np.arange(count)).sum())
    if not moved or not two.explained_by(np.moveaxis(left[nearest].reshape(turned.shape), 0, axis)):
        return ""
    different = len(np.unique(nearest))
    if different == count:
        return f"the reference's with {moved} of {count} slices of axis {axis} in another order"
    return f"the reference's with {count - different} of {count} slices of axis {axis} repeated from others"


def _partly(two: _Two) -> str:
    """A difference that is a whole part of the value: zeroed elements."""
    changed = np.abs(two.t - two.r) > 1e-9 * float(np.abs(two.r).max())
    if float(changed.mean()) < 0.75 and not two.t[changed].any():
        return f"the reference's with {int(changed.sum())} of {two.r.size} elements zero"
    return ""
