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
from collections.abc import Iterable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Reduction", "Result"]

State = TypeVar("State")
Result = dict[str, "float | Tensor"]


class Reduction(ABC, Generic[State]):
    """A fold over tensors; ``state`` is ``None`` before the first. Subclasses: final frozen dataclasses."""

    name: ClassVar[str]
    # True where only the elements count, not their places: a value may then be folded in pieces, cut anyhow.
    elementwise: ClassVar[bool] = False

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

    @abstractmethod
    def merge(self, left: State, right: State) -> State:
        """Combine two folds, ``left`` having come first."""

    @abstractmethod
    def result(self, state: State) -> Result:
        """What the fold amounts to: named numbers (floats or 0-dim tensors) and named tensors."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """The reduction as JSON: ``{"reduction": name, ...its parameters}``."""
