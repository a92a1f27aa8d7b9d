"""Name the exact relation of two values where there is one: a constant factor, a transpose, rows in another order.

A relation is named only when it explains the whole difference: what is left is no more than rounding. The first
that fits is named; a value that fits none has none.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.comparison.measures import unraveled
from torchtap.comparison.values import CHUNK, Comparable, Value, pieces, resolution, value_of

__all__ = [
    "MOST",
    "Concentration",
    "Element",
    "Profile",
    "differing_term",
    "factor",
    "hidden_only",
    "locate",
    "pattern",
]

# What an axis is called when its place in the shape says so; anything else is "axis n".
_AXIS_NAMES = {
    2: ("row", "channel"),
    3: ("sample", "token", "channel"),
    4: ("sample", "channel", "row", "column"),
}
Wide = npt.NDArray[np.float64]
_CARRIES = 0.95
_MOST_ROWS = 1 << 24


@final
@dataclass(frozen=True, slots=True)
class Element:
    """One element and its two values."""

    index: tuple[int, ...]
    reference: float
    target: float


@final
@dataclass(frozen=True, slots=True)
class Concentration:
    """Few positions of one axis that together carry ``share`` of the squared error."""

    axis: int
    name: str
    positions: tuple[int, ...]
    size: int
    share: float

    def __str__(self) -> str:
        what = self.name if len(self.positions) == 1 else f"{self.name}s"
        listed = _ranges(self.positions)
        return f"{what} {listed} of {self.size}"


@final
@dataclass(frozen=True, slots=True)
class Profile:
    """The worst elements of a comparison and the axes along which the error is concentrated."""

    elements: tuple[Element, ...]
    concentrations: tuple[Concentration, ...]

    def __str__(self) -> str:
        if self.concentrations:
            return "in " + ", ".join(str(each) for each in self.concentrations)
        return "spread over all elements"


def locate(reference: Comparable, target: Comparable, *, elements: int = 10, chunk: int = CHUNK) -> Profile:
    """Find the worst elements and the axes that carry the error. Both values have the same shape."""
    left, right = value_of(reference).real(), value_of(target).real()
    shape = left.shape
    columns = shape[-1] if shape else 1
    rows = left.size // columns if columns else 0
    if not rows:
        return Profile((), ())
    energies = _Energies(rows, columns)
    worst: list[tuple[float, int, float, float]] = []
    # Whole rows in each piece, so that both sums are plain reductions.
    step = max(1, chunk // columns) * columns
    for offset, r, t in pieces(left, right, step):
        a, b = r.astype(np.float64), t.astype(np.float64)
        distance = _apart(a, b)
        _keep_worst(worst, offset, distance, a, b, elements)
        energies.add(offset, distance)
    found = tuple(Element(unraveled(-flat, shape), r, t) for _, flat, r, t in sorted(worst, reverse=True))
    if not energies.whole or not shape:
        return Profile(found, ())
    return Profile(found, _concentrations(energies.rows.reshape(shape[:-1]), energies.columns, shape))


class _Energies:
    """The squared error of each row and of each column, as long as there are not too many and they come whole."""

    def __init__(self, rows: int, columns: int) -> None:
        self.whole = rows <= _MOST_ROWS
        self.rows = np.zeros(rows if self.whole else 0)
        self.columns = np.zeros(columns)

    def add(self, offset: int, distance: npt.NDArray[np.float64]) -> None:
        columns = len(self.columns)
        self.whole = self.whole and offset % columns == 0 and distance.size % columns == 0
        if self.whole:
            energy = np.minimum(distance, 1e150).reshape(-1, columns) ** 2
            self.rows[offset // columns : offset // columns + len(energy)] = energy.sum(1)
            self.columns += energy.sum(0)


def _apart(a: Wide, b: Wide) -> Wide:
    """The distance of each element. A place where one side alone is not finite is as wrong as can be; where both
    agree it is no error."""
    with np.errstate(invalid="ignore", over="ignore"):
        distance: Wide = np.abs(b - a)
        distance[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    distance[np.isnan(distance)] = np.inf
    return distance


def _keep_worst(
    worst: list[tuple[float, int, float, float]], offset: int, distance: Wide, a: Wide, b: Wide, most: int
) -> None:
    """Add the worst elements of a piece to a heap of the worst of all."""
    some = min(most, distance.size)
    for at in np.argpartition(distance, distance.size - some)[-some:].tolist():
        if distance[at] > 0.0:
            entry = (float(distance[at]), -(offset + at), float(a[at]), float(b[at]))
            (heapq.heappush if len(worst) < most else heapq.heappushpop)(worst, entry)


def _concentrations(
    row_energy: Wide, column_energy: Wide, shape: tuple[int, ...]
) -> tuple[Concentration, ...]:
    names = _AXIS_NAMES.get(len(shape), tuple(f"axis {n}" for n in range(len(shape))))
    found = []
    for axis, size in enumerate(shape):
        if axis == len(shape) - 1:
            energy = column_energy
        else:
            energy = np.moveaxis(row_energy, axis, 0).reshape(size, -1).sum(1)
        total = float(energy.sum())
        if size < 2 or total <= 0.0:
            continue
        positions = np.argsort(-energy, kind="stable")
        carried = np.minimum(energy[positions].cumsum() / total, 1.0)
        needed = int((carried < _CARRIES).sum()) + 1
        if needed <= max(1, size // 4):
            found.append(
                Concentration(
                    axis,
                    names[axis],
                    tuple(sorted(positions[:needed].tolist())),
                    size,
                    float(carried[needed - 1]),
                )
            )
    return tuple(found)


def _ranges(positions: tuple[int, ...], most: int = 6) -> str:
    """``(1, 2, 3, 7)`` as ``1-3, 7``, cut short after a few."""
    spans: list[list[int]] = []
    for position in positions:
        if spans and position == spans[-1][1] + 1:
            spans[-1][1] = position
        else:
            spans.append([position, position])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:most]]
    return ", ".join(shown) + (" ..." if len(spans) > most else "")


MOST = 1 << 22  # elements; larger values have no relation looked for
_LEFT_OVER = 1e-3  # of the difference that a term may leave unexplained
_WHOLE = 1e-3  # how near to once a term has to be to be called the term itself


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


_PATTERNS_LEFT_OVER = 1e-3  # of the difference that a relation may leave unexplained
_PATTERNS_MOST_ROWS = 4096


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Two:
    """Both sides in float64, and how much of their difference may stay unexplained."""

    r: Wide
    t: Wide
    allowed: float
    digits: int  # of a constant that are worth telling

    def explained_by(self, other: Wide) -> bool:
        """Return True if the target is this, up to rounding."""
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
    allowed = min(max(_PATTERNS_LEFT_OVER * difference, rounding), 0.05 * difference)
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
    if count > _PATTERNS_MOST_ROWS:
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
