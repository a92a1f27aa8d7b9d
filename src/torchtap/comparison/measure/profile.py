"""Where in a tensor the error sits: the worst elements, and the axes along which it is concentrated.

It guarantees:
- the memory needed grows with the tensor's rows, not with its elements;
- an axis is named only when few of its positions carry nearly all of the error.

Not here: how large the error is (`measures`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from torchtap.comparison.measure.measures import unraveled
from torchtap.comparison.measure.values import CHUNK, Comparable, pieces, value_of

__all__ = ["Concentration", "Element", "Profile", "locate"]

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
