"""What every reduction is: a frozen description and a fold over tensors.

A reduction keeps something small of a stream of tensors. It guarantees (held by
``torchtap.testing.ReductionContract``):
- ``merge(fold(xs), fold(ys))`` equals ``fold(xs + ys)``, so micro-batches, steps and ranks combine;
- ``update`` never keeps a reference to memory that the model may change later;
- the values that went in are left as they were.

``update`` and ``merge`` own the state in their first argument: they may change it and hand it back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["AnyReduction", "Arrival", "Reduction", "Result", "RowBlock"]

State = TypeVar("State")
Result = dict[str, "float | Tensor"]


class Arrival(Protocol):
    """The results of a block's rows, some of which are on their way from a device."""

    def done(self) -> bool:
        """Whether they are there."""

    def results(self) -> npt.NDArray[np.float64]:
        """The results of each row; waits for them."""

    def states(self) -> npt.NDArray[np.float64]:
        """The state of each row; waits for them."""


class RowBlock(Protocol):
    """A reduction's own fast path: the folds of many sites as the rows of one block.

    A value is measured into a scratch slot and folded into a row; while it is in its slot, a second site that
    shows the same value folds the slot. ``statistics`` names the columns of a result.

    A block may take some values faster, and recognise them by itself: ``take`` and its like say whether they did.
    """

    statistics: ClassVar[tuple[str, ...]]

    def __init__(self, rows: int, *, scratch: int) -> None: ...

    def grow(self, rows: int) -> None:
        """Have at least so many rows."""

    def reset(self, rows: slice | None = None) -> None:
        """Nothing was seen in these rows; in any, where none are given."""

    def take(self, row: int, value: Tensor) -> bool:
        """Fold a small value into a row, at once and whole whatever other threads do. False: nothing was done."""

    def take_any(self, row: int, value: Tensor) -> bool:
        """The same of any size; it may let other threads run meanwhile."""

    def put_each(self, rows: list[int], values: list[Tensor]) -> Sequence[int]:
        """Replace rows by the folds of small values. Return the positions of the values that are left."""

    def forget(self) -> None:
        """Recognise nothing that was taken until now."""

    def measure_into(self, row: int, scratch: int, value: Tensor) -> None:
        """Measure a value into a slot and fold it into a row."""

    def fold(self, row: int, scratch: int) -> None:
        """Fold what is in a slot into a row."""

    def fold_state(self, row: int, state: Tensor) -> None:
        """Fold a state that was computed elsewhere into a row."""

    def result(self, row: int) -> npt.NDArray[np.float64]:
        """The results of one row."""

    def results(self, rows: npt.NDArray[np.intp] | None = None) -> npt.NDArray[np.float64]:
        """The results of each row, or of those given."""

    def states(self) -> npt.NDArray[np.float64]:
        """Return a copy of the rows' states."""

    def hand_over(self) -> Arrival | None:
        """Send what is on other devices to the host, without waiting; None where nothing is."""


class Reduction(ABC, Generic[State]):
    """A fold over tensors; ``state`` is ``None`` before the first. Subclasses: final frozen dataclasses."""

    name: ClassVar[str]
    # True where only the elements count, not their places: a value may then be folded in pieces, cut anyhow.
    elementwise: ClassVar[bool] = False
    # A block that folds many sites at once, in place of `update`.
    block: ClassVar[type[RowBlock] | None] = None
    # True where the result is the value itself: a copy of it serves every site that shows it, and looking inside a
    # model keeps the values of several passes apart.
    whole: ClassVar[bool] = False

    @property
    def refers(self) -> bool:
        """Whether what is kept is the model's own memory, which only a look that is soon over may do."""
        return False

    @abstractmethod
    def update(self, state: State | None, value: Tensor) -> State:
        """Fold one more tensor in."""

    def update_pieces(self, state: State | None, pieces: Iterable[Tensor]) -> State:
        """Fold in one value that comes in pieces, cut along dimension 1. There is at least one piece."""
        if not self.elementwise:
            return self.update(state, torch.cat(list(pieces), 1))
        for piece in pieces:
            state = self.update(state, piece)
        assert state is not None
        return state

    def first(self, value: Tensor, copy: Callable[[Tensor], Tensor]) -> State:
        """The fold of one value; ``copy`` copies tensors on the host, perhaps into memory that was used before."""
        return self.update(None, value)

    @abstractmethod
    def merge(self, left: State, right: State) -> State:
        """Combine two folds, ``left`` having come first."""

    @abstractmethod
    def result(self, state: State) -> Result:
        """What the fold amounts to: named numbers (floats or 0-dim tensors) and named tensors."""

    def to_merge(self, state: State) -> dict[str, Tensor]:
        """What a reader needs beside the result to merge this fold with other ranks'; nothing where that is enough."""
        return {}

    @abstractmethod
    def spec(self) -> dict[str, object]:
        """The reduction as JSON: ``{"reduction": name, ...its parameters}``."""


AnyReduction: TypeAlias = Reduction[Any]  # whatever its state is
