"""Name the exact relation of two tensors where there is one: a constant factor, a transpose, rows in another order.

A relation is named only when it explains the whole difference: what is left is no more than rounding. The first
that fits is named; a tensor that fits none has none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchtap.comparison.measure.chunks import as_real

__all__ = ["factor", "pattern"]

_MOST = 1 << 22  # elements; larger tensors are looked at through their first rows
_LEFT_OVER = 1e-3  # of the difference that a relation may leave unexplained
_MOST_ROWS = 4096


def pattern(reference: Tensor, target: Tensor) -> str:
    """How the target follows from the reference, in words; empty when no relation is exact."""
    if reference.shape != target.shape or not 1 < reference.numel() <= _MOST:
        return ""
    r, t = (as_real(value).to("cpu", torch.float64) for value in (reference, target))
    if not (torch.isfinite(r).all() and torch.isfinite(t).all()):
        return ""
    difference = float((t - r).norm())
    size = float(r.norm())
    if not (0.0 < difference < math.inf and 0.0 < size < math.inf):
        return "all zero" if size > 0.0 and float(t.norm()) == 0.0 else ""
    rounding = 4 * max(_step(reference), _step(target)) * size
    allowed = min(max(_LEFT_OVER * difference, min(rounding, 0.05 * difference)), 0.05 * difference)

    def explains(other: Tensor) -> bool:
        return other.shape == t.shape and float((t - other).norm()) <= allowed

    if float(t.norm()) == 0.0:
        return "all zero"
    return _scaled(r, t, explains) or _rearranged(r, t, explains) or _partly(r, t, difference)


def factor(reference: Tensor, target: Tensor) -> tuple[float, float]:
    """``(c, what is left)``: the constant for which c x reference is nearest, and the relative distance left then."""
    r, t = (as_real(value).to("cpu", torch.float64).reshape(-1) for value in (reference, target))
    size = float(r @ r)
    if size == 0.0:
        return math.nan, math.inf
    constant = float(t @ r) / size
    whole = float(t.norm())
    return constant, float((t - constant * r).norm()) / whole if whole else math.inf


def _step(value: Tensor) -> float:
    return torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0


def _scaled(r: Tensor, t: Tensor, explains: object) -> str:
    assert callable(explains)
    constant = float((t * r).sum()) / float((r * r).sum())
    if explains(constant * r):
        if abs(constant + 1.0) < 1e-6:
            return "the reference's with the sign flipped"
        return f"{constant:.4g} × the reference's"
    shift = float((t - r).mean())
    if explains(r + shift):
        return f"the reference's {'+' if shift >= 0 else '−'} {abs(shift):.4g}"
    return ""


def _rearranged(r: Tensor, t: Tensor, explains: object) -> str:
    assert callable(explains)
    if r.dim() >= 2 and r.shape[-1] == r.shape[-2] and explains(r.transpose(-1, -2)):
        return "the reference's transposed"
    if r.dim() >= 2 and r.shape[-1] != r.shape[-2] and explains(r.transpose(-1, -2).reshape(r.shape)):
        return "the reference's transposed, read in the wrong layout"
    for axis in range(r.dim()):
        if r.shape[axis] < 2:
            continue
        if explains(r.flip(axis)):
            return f"the reference's reversed along axis {axis}"
        for by in (1, -1):
            if _shifted(r, t, axis, by, explains):
                return f"the reference's shifted by one along axis {axis}"
        named = _reordered(r, t, axis, explains)
        if named:
            return named
    return ""


def _shifted(r: Tensor, t: Tensor, axis: int, by: int, explains: object) -> bool:
    """Also when what was pushed over the edge is gone: then all but one position follow."""
    assert callable(explains)
    rolled = r.roll(by, axis)
    if explains(rolled):
        return True
    if r.shape[axis] < 4:
        return False
    edge = rolled.clone()
    index = 0 if by > 0 else r.shape[axis] - 1
    edge.select(axis, index).copy_(t.select(axis, index))
    return bool(explains(edge))


def _reordered(r: Tensor, t: Tensor, axis: int, explains: object) -> str:
    """The same slices in another order, or fewer slices repeated."""
    assert callable(explains)
    count = r.shape[axis]
    if count > _MOST_ROWS:
        return ""
    left, right = (value.movedim(axis, 0).reshape(count, -1) for value in (r, t))
    if left.shape[1] < 2:
        return ""
    nearest = torch.cdist(right[None], left[None])[0].argmin(1)
    if bool((nearest == torch.arange(count)).all()):
        return ""
    if not explains(left[nearest].reshape(r.movedim(axis, 0).shape).movedim(0, axis)):
        return ""
    moved = int((nearest != torch.arange(count)).sum())
    if len(nearest.unique()) == count:
        return f"the reference's with {moved} of {count} slices of axis {axis} in another order"
    return f"the reference's with {count - len(nearest.unique())} of {count} slices of axis {axis} repeated from others"


def _partly(r: Tensor, t: Tensor, difference: float) -> str:
    """A difference that is a whole part of the value: zeroed or constant slices."""
    changed = (t - r).abs() > 1e-9 * float(r.abs().max())
    share = float(changed.double().mean())
    if share < 0.75 and bool((t[changed] == 0).all()):
        return f"the reference's with {int(changed.sum())} of {r.numel()} elements zero"
    return ""
