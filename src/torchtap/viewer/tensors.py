"""Recorded tensors as pictures: which there are, and two-dimensional slices of them.

Guarantees: a slice that fits is sent with its exact values (float64 where float32 would round); a larger one
is reduced to the least and greatest value of each cell; nothing is drawn of a shape that no screen shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from torchtap.viewer.downsample import extremes
from torchtap.viewer.opened import OpenRun, Refused
from torchtap.viewer.wire import encode_json, pack

if TYPE_CHECKING:
    from torchtap.store.read.results import TensorRef

__all__ = ["SliceWindow", "slice_of", "span_of", "tensors_of"]

_MOST_DIMENSIONS = 16
_MOST_CELLS = 1 << 20
_MOST_STACKED = 64
_SPANNED = 12
_SPAN_BYTES = 64 << 20


@final
@dataclass(frozen=True, slots=True)
class SliceWindow:
    """Which slice: the axes that go down and across, where the other axes stand, and the part of it."""

    step: int | None = None
    field: str = "value"
    down: int | None = None  # None: the last axis but one
    across: int | None = None  # None: the last axis
    stack: int | None = None  # one picture for each place along this axis
    index: tuple[int, ...] = ()  # a place for every axis; those of the picture's axes are not looked at
    first_row: int = 0
    last_row: int | None = None
    first_column: int = 0
    last_column: int | None = None
    size: int = 512  # most rows and columns of one picture


def tensors_of(shown: OpenRun, site: str) -> bytes:
    """The tensors recorded at ``site``, by field, with the steps of each."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[int]] = {}
    with shown.lock:
        for reference in shown.run.tensors(site):
            shape = tuple(int(n) for n in reference.shape[: _MOST_DIMENSIONS + 1])
            key = (reference.field, str(reference.reduction), shape, str(reference.dtype))
            groups.setdefault(key, []).append(int(reference.step))
    listed = [
        {"field": field, "reduction": reduction, "shape": list(shape), "dtype": dtype, "steps": sorted(steps)}
        for (field, reduction, shape, dtype), steps in groups.items()
    ]
    return encode_json({"site": site, "tensors": listed})


def span_of(shown: OpenRun, site: str, field: str) -> bytes:
    """The least and the greatest value of a tensor over time, so that colours mean the same at every step.

    Of at most `_SPANNED` steps, the first and the last among them.
    """
    with shown.lock:
        kept = {int(r.step): r for r in shown.run.tensors(site) if r.field == field}
        known = shown.remember(("span", site, field), lambda: _span(shown, site, field, list(kept.items())))
    return encode_json({"least": known[0], "greatest": known[1]})


def _span(
    shown: OpenRun, site: str, field: str, kept: list[tuple[int, TensorRef]]
) -> tuple[float | None, float | None]:
    each = max((reference.nbytes for _, reference in kept), default=1)
    most = max(1, min(_SPANNED, _SPAN_BYTES // max(1, each)))
    chosen = {int(i) for i in np.linspace(0, len(kept) - 1, most)} if kept else set()
    least, greatest = np.inf, -np.inf
    for step, _ in [kept[i] for i in sorted(chosen)]:
        values = shown.tensor(site, step, field)
        values = np.abs(values) if values.dtype.kind == "c" else values
        finite = values[np.isfinite(values)]
        if len(finite):
            least, greatest = min(least, float(finite.min())), max(greatest, float(finite.max()))
    return (None, None) if least > greatest else (least, greatest)


def _axis(value: int | None, default: int, dimensions: int) -> int:
    axis = default if value is None else value
    if not 0 <= axis < dimensions:
        raise Refused(f"axis {axis} of a tensor with {dimensions} axes")
    return axis


def _numbers(values: np.ndarray) -> np.ndarray:
    """As float32 or, where that would round, float64; complex numbers as their magnitude."""
    if values.dtype.kind == "c":
        values = np.abs(values)
    single = values.dtype.itemsize <= (4 if values.dtype.kind == "f" else 2)
    return np.ascontiguousarray(values, dtype="<f4" if single else "<f8")


def _drawable(shown: OpenRun, site: str, step: int | None, field: str) -> np.ndarray:
    with shown.lock:
        if site not in shown.position:
            raise Refused(f"the run {shown.name!r} has no site {site!r}", 404)
        for reference in shown.run.tensors(site):
            if len(reference.shape) > _MOST_DIMENSIONS:
                raise Refused(f"a tensor of {len(reference.shape):,} axes cannot be drawn", 413)
        return shown.tensor(site, step, field)


def _difference(tensor: np.ndarray, other: np.ndarray) -> np.ndarray:
    if tensor.shape != other.shape:
        raise Refused(f"a tensor of shape {tensor.shape} and one of shape {other.shape} have no difference")
    wide = np.result_type(tensor.dtype, other.dtype, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        difference: np.ndarray = tensor.astype(wide) - other.astype(wide)
    return difference


def slice_of(
    shown: OpenRun, site: str, window: SliceWindow, minus: tuple[OpenRun, int | None] | None = None
) -> bytes:
    """One picture of a tensor (or one for each place along ``stack``): arrays low and high.

    ``minus``: of the difference to the same site of a run at a step.
    """
    tensor = _drawable(shown, site, window.step, window.field)
    if minus is not None:
        tensor = _difference(tensor, _drawable(minus[0], site, minus[1], window.field))
    shape = tuple(tensor.shape)
    flat = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor
    axes = _axes(window, flat.ndim)
    picture = flat[_where(window, axes, flat.shape)]
    # The axes that are left, in the order stack, down, across.
    left = sorted(axis for axis in axes if axis is not None)
    picture = picture.transpose([left.index(axis) for axis in axes if axis is not None])
    if axes.stack is None:
        picture = picture[np.newaxis]
    if picture.size == 0:
        raise Refused("this tensor is empty", 404)
    if picture.size > 64 * _MOST_CELLS:
        raise Refused(f"a slice of {picture.size:,} values is too large to draw; choose a smaller part", 413)
    return _encode(picture, shape, window)


class _Axes(NamedTuple):
    """Which axes of a tensor a picture shows; stack is None where there is one picture."""

    stack: int | None
    down: int
    across: int


def _axes(window: SliceWindow, dimensions: int) -> _Axes:
    across = _axis(window.across, dimensions - 1, dimensions)
    down = _axis(window.down, dimensions - 2, dimensions)
    stack = None if window.stack is None else _axis(window.stack, 0, dimensions)
    if across == down or stack in (across, down):
        raise Refused("a picture needs two different axes, and a stack a third")
    return _Axes(stack, down, across)


def _where(window: SliceWindow, axes: _Axes, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """The part of a tensor that a picture shows."""
    parts: dict[int | None, slice] = {
        axes.stack: slice(0, _MOST_STACKED),
        axes.down: slice(window.first_row, window.last_row),
        axes.across: slice(window.first_column, window.last_column),
    }
    places = list(window.index) + [0] * (len(shape) - len(window.index))
    where: list[int | slice] = []
    for axis, length in enumerate(shape):
        place = places[axis]
        if axis not in parts and not 0 <= place < max(1, length):
            raise Refused(f"index {place} of axis {axis}, which has {length} places")
        where.append(parts.get(axis, place))
    return tuple(where)


def _encode(picture: np.ndarray, shape: tuple[int, ...], window: SliceWindow) -> bytes:
    values = _numbers(picture)
    rows, columns = int(values.shape[1]), int(values.shape[2])
    facts: dict[str, Any] = {
        "shape": list(shape),
        "pictures": int(values.shape[0]),
        "rows": rows,
        "columns": columns,
        "firstRow": window.first_row,
        "firstColumn": window.first_column,
    }
    finite = values[np.isfinite(values)]
    if len(finite):
        facts["least"], facts["greatest"] = float(finite.min()), float(finite.max())
    facts["nans"] = int(np.isnan(values).sum())
    facts["infs"] = int(np.isinf(values).sum())
    if rows <= window.size and columns <= window.size:
        facts |= {"exact": True, "cellRows": rows, "cellColumns": columns}
        return pack(facts, {"low": values})
    cells = [extremes(plane, window.size, window.size) for plane in values]
    low, high = np.stack([cell[0] for cell in cells]), np.stack([cell[1] for cell in cells])
    facts |= {"exact": False, "cellRows": int(low.shape[1]), "cellColumns": int(low.shape[2])}
    return pack(facts, {"low": low, "high": high})
