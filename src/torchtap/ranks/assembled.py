"""A tensor put together from the parts that ranks recorded, when it is asked for and not before. A `Found`.

Parts with boxes are copied to where they lie in the whole; other parts are joined along the dimension that their axis
divides, in the order of the axis; parts of a sum are added. Samples are joined pass by pass, as if one process had been
given the joined batch each time. Only one part is in memory beside the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np

from torchtap.errors import RunError
from torchtap.placement import Axis, Box, Placement
from torchtap.store.read.results import TensorRef
from torchtap.store.read.stored_tensors import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Assembled", "Piece", "Summed"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One rank's part of a tensor, not read yet."""

    rank: int
    placement: Placement
    stored: StoredTensor
    passes: int = 1  # of the model, whose values lie in it one after the other


_Value: TypeAlias = Any  # an array, a tensor, or a shape in the place of one: they are put together alike


class _Part(NamedTuple):
    """A piece, and what gives its value."""

    piece: Piece
    read: Callable[[], _Value]


class _Way(NamedTuple):
    """How values of one sort are put together."""

    cat: Callable[[list[_Value], int], _Value]
    empty: Callable[[tuple[int, ...], _Value], _Value]


@final
class Assembled:
    """A tensor in pieces, at least one; each part of the whole once."""

    def __init__(self, pieces: Sequence[Piece], *, gaps: bool = False) -> None:
        self._pieces = list(pieces)
        self._gaps = gaps  # whether what no rank recorded may be zero

    def ref(self) -> TensorRef:
        refs = [piece.stored.ref() for piece in self._pieces]
        shape = self._shape([ref.shape for ref in refs])
        return refs[0]._replace(shape=shape, nbytes=sum(ref.nbytes for ref in refs))

    def array(self) -> np.ndarray:
        way = _Way(np.concatenate, lambda shape, like: np.zeros(shape, like.dtype))
        whole: np.ndarray = self._build(StoredTensor.array, way)
        return whole

    def tensor(self) -> Tensor:
        import torch

        way = _Way(torch.cat, lambda shape, like: torch.zeros(shape, dtype=like.dtype))
        whole: Tensor = self._build(StoredTensor.tensor, way)
        return whole

    def pieces(self, size: int) -> Iterator[memoryview] | None:
        """The bytes in order, where each part is a stretch of the whole's memory."""
        if not self._in_a_row():
            return None
        found = [piece.stored.pieces(size) for piece in self._pieces]
        if any(each is None for each in found):
            return None
        return (piece for each in found if each is not None for piece in each)

    # -- shapes -------------------------------------------------------------------------------------------

    def _in_a_row(self) -> bool:
        """Whether the parts follow one another along the first dimension, in the order in which they are here."""
        placement = self._pieces[0].placement
        dims = _joined_dims(placement)
        if dims.count(0) < len(dims):
            return False
        if len(self._pieces) == 1:
            return len(dims) <= 1 or placement.boxes is not None
        if len(dims) > 1 or any(piece.passes > 1 for piece in self._pieces):
            return False
        return placement.boxes is None or _follow(self._pieces)

    def _shape(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of the whole, from placements and from the parts' own shapes; nothing is read."""
        parts = [
            _Part(piece, partial(_Shaped, shape)) for piece, shape in zip(self._pieces, shapes, strict=True)
        ]
        found: _Shaped = self._join(parts, _Way(_join_shapes, lambda shape, like: _Shaped(shape)))
        return found.shape

    # -- values -------------------------------------------------------------------------------------------

    def _build(self, read: Callable[[StoredTensor], _Value], way: _Way) -> _Value:
        if len(self._pieces) == 1 and self._is_whole(self._pieces[0]):
            return read(self._pieces[0].stored)
        count = self._passes()
        of_passes = [
            self._join(
                [_Part(piece, partial(_nth, read, piece.stored, count, number)) for piece in self._pieces],
                way,
            )
            for number in range(count)
        ]
        return of_passes[0] if count == 1 else way.cat(of_passes, 0)

    def _passes(self) -> int:
        """How many passes lie one after the other in each part; one where that cannot be told."""
        passes = {piece.passes for piece in self._pieces}
        count = max(passes.pop(), 1) if len(passes) == 1 else 1
        shapes = [piece.stored.ref().shape for piece in self._pieces] if count > 1 else []
        return count if all(shape and shape[0] and shape[0] % count == 0 for shape in shapes) else 1

    def _is_whole(self, piece: Piece) -> bool:
        return all(not axis.share.divides or axis.size == 1 for axis in piece.placement.axes)

    def _join(self, parts: list[_Part], way: _Way) -> _Value:
        """One axis after the other, the outermost last; where boxes are known they take the place of shards."""
        first = parts[0].piece.placement
        numbers = [
            number
            for number, axis in enumerate(first.axes)
            if (axis.share.divides and not (first.boxes is not None and axis.share.kind == "shard"))
            or _adds(axis)
        ]
        return self._join_axes(parts, numbers, way)

    def _join_axes(self, parts: list[_Part], numbers: list[int], way: _Way) -> _Value:
        if not numbers:
            return self._fill(parts, way)
        number, rest = numbers[0], numbers[1:]

        def place(part: _Part) -> int:
            return part.piece.placement.axes[number].at

        ordered = sorted(parts, key=place)
        joined = [self._join_axes(list(group), rest, way) for _, group in groupby(ordered, key=place)]
        axis = parts[0].piece.placement.axes[number]
        if _adds(axis):
            return _add(joined, axis.share.op or "sum")
        dim = axis.share.dim or 0
        return joined[0] if len(joined) == 1 else way.cat(joined, dim)

    def _fill(self, parts: list[_Part], way: _Way) -> _Value:
        """The whole out of boxes; the part itself where it has none."""
        placement = parts[0].piece.placement
        shape = placement.shape
        own = parts[0].read()
        if placement.boxes is None or shape is None:
            return own
        if isinstance(own, _Shaped):
            return way.empty(shape, own)
        whole = way.empty((prod(shape),) if placement.flat else shape, own)
        for part in parts:
            _copy(whole, own if part is parts[0] else part.read(), part.piece.placement.boxes or ())
        if not self._gaps:
            self._check_whole(parts, shape)
        return whole.reshape(shape)

    def _check_whole(self, parts: list[_Part], shape: tuple[int, ...]) -> None:
        covered = sum(prod(box.size) for part in parts for box in part.piece.placement.boxes or ())
        if covered < prod(shape):
            raise RunError(
                f"{self._pieces[0].stored.name.site!r} of shape {list(shape)} is not whole: ranks "
                f"{[part.piece.rank for part in parts]} recorded {covered} of its {prod(shape)} elements; "
                "run.rank(k).tensor(...) gives one rank's part, tt.open(path, partial=True) what there is, and zeros"
            )


def _joined_dims(placement: Placement) -> list[int | None]:
    """The dimensions along which parts are joined, one for each axis of ranks; None where they are added."""
    axes = [axis for axis in placement.axes if axis.share.divides or _adds(axis)]
    return [None if _adds(axis) else axis.share.dim for axis in axes]


def _follow(pieces: Sequence[Piece]) -> bool:
    """Whether each part is one box, and begins where those before it have ended, or later."""
    boxes = [piece.placement.boxes or () for piece in pieces]
    if any(len(each) != 1 for each in boxes):
        return False
    starts = [each[0].offset[0] for each in boxes]
    return starts == sorted(starts)


def _adds(axis: Axis) -> bool:
    return axis.share.kind == "partial" and axis.size > 1


def _add(parts: list[_Value], op: str) -> _Value:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / len(parts) if op == "avg" else total


def _nth(read: Callable[[StoredTensor], _Value], stored: StoredTensor, count: int, number: int) -> _Value:
    """What one of several passes left in a part."""
    value = read(stored)
    if count == 1:
        return value
    size = value.shape[0] // count
    return value[number * size : (number + 1) * size]


def _copy(whole: _Value, own: _Value, boxes: Sequence[Box]) -> None:
    """Copy a part's boxes; those of a strided shard follow one another along the dimensions that it divides."""
    starts: list[dict[int, int]] = [{} for _ in own.shape]  # by dimension: where a stretch begins in the part
    ends = [0] * len(own.shape)
    for box in boxes:
        for dim, (offset, size) in enumerate(zip(*box, strict=True)):
            if offset not in starts[dim]:
                starts[dim][offset] = ends[dim]
                ends[dim] += size
        at = [starts[dim][offset] for dim, offset in enumerate(box.offset)]
        source = tuple(slice(start, start + size) for start, size in zip(at, box.size, strict=True))
        target = tuple(slice(start, start + size) for start, size in zip(*box, strict=True))
        whole[target] = own[source]


@final
class _Shaped:
    """A shape in the place of a value."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __add__(self, other: _Shaped) -> _Shaped:
        return self

    def __truediv__(self, count: int) -> _Shaped:
        return self


def _join_shapes(parts: Sequence[_Shaped], dim: int) -> _Shaped:
    shape = list(parts[0].shape)
    if dim < len(shape):
        shape[dim] = sum(part.shape[dim] for part in parts)
    return _Shaped(tuple(shape))


@final
class Summed:
    """Counts of several parts: those of the whole are their sum."""

    def __init__(self, stored: Sequence[StoredTensor]) -> None:
        self._stored = list(stored)

    def ref(self) -> TensorRef:
        return self._stored[0].ref()

    def array(self) -> np.ndarray:
        total = self._stored[0].array()
        for each in self._stored[1:]:
            total = total + each.array()
        return total

    def tensor(self) -> Tensor:
        total = self._stored[0].tensor()
        for each in self._stored[1:]:
            total = total + each.tensor()
        return total

    def pieces(self, size: int) -> Iterator[memoryview] | None:
        return None
