"""Define reductions: a frozen description, and a fold over tensors. Find them by name.

``torchtap.testing.ReductionContract`` checks what every reduction guarantees:
- ``merge(fold(xs), fold(ys))`` equals ``fold(xs + ys)``, so micro-batches, steps and ranks combine;
- ``update`` keeps no reference to memory that the model may change later, and does not change its value.

``update`` and ``merge`` own the state in their first argument: they may change and return it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from torchtap._torch import innermost_transform, outside_of_transforms
from torchtap.errors import ReductionError
from torchtap.registry import Registry

__all__ = [
    "REDUCTIONS",
    "AnyReduction",
    "Reduction",
    "Result",
    "outside_transforms",
    "reduction_class",
    "reduction_from_spec",
]

State = TypeVar("State")
Update = TypeVar("Update", bound=Callable[..., object])
Result = dict[str, "float | Tensor"]


class Reduction(ABC, Generic[State]):
    """A fold over tensors; ``state`` is ``None`` before the first. Subclasses: final frozen dataclasses."""

    name: ClassVar[str]
    # True if the places of the elements do not matter: a value may then be folded in pieces.
    elementwise: ClassVar[bool] = False
    # True if the receiver folds it as rows of one `StatsBlock` instead of calling `update`.
    in_rows: ClassVar[bool] = False
    # True if the result is the value itself: one copy serves every site that shows it, and `capture` keeps the
    # values of several passes apart.
    whole: ClassVar[bool] = False

    @property
    def refers(self) -> bool:
        """Return True if the state is the model's own memory, which only a `capture` may keep."""
        return False

    @abstractmethod
    def update(self, state: State | None, value: Tensor) -> State:
        """Fold in one more tensor."""

    def update_pieces(self, state: State | None, pieces: Iterable[Tensor]) -> State:
        """Fold in one value, given in one or more pieces cut along dimension 1."""
        if not self.elementwise:
            return self.update(state, torch.cat(list(pieces), 1))
        for piece in pieces:
            state = self.update(state, piece)
        assert state is not None
        return state

    def first(self, value: Tensor, copy: Callable[[Tensor], Tensor]) -> State:
        """Return the fold of one value. ``copy`` copies tensors on the host, perhaps into pooled memory."""
        return self.update(None, value)

    @abstractmethod
    def merge(self, left: State, right: State) -> State:
        """Combine two folds; the values of ``left`` came first."""

    @abstractmethod
    def result(self, state: State) -> Result:
        """Return named numbers (floats or 0-dim tensors) and named tensors."""

    def to_merge(self, state: State) -> dict[str, Tensor]:
        """Return what a reader needs beside the result to merge this fold with those of other ranks."""
        return {}

    @abstractmethod
    def spec(self) -> dict[str, object]:
        """Return the reduction as JSON: ``{"reduction": name, ...its parameters}``."""


AnyReduction: TypeAlias = Reduction[Any]


def outside_transforms(update: Update) -> Update:
    """Make a function compute outside of the ``torch.func`` transforms that are running.

    Inside of ``vmap``, ``grad`` and the like torch wraps every new tensor. A state of wrapped tensors would become
    invalid with the transform.
    """

    @wraps(update)
    def computed_outside(*args: object, **kwargs: object) -> object:
        if innermost_transform() is None:
            return update(*args, **kwargs)
        with outside_of_transforms():
            return update(*args, **kwargs)

    return cast(Update, computed_outside)


REDUCTIONS = Registry(
    what="reduction",
    group="torchtap.reductions",
    built_in={
        "entropy": "torchtap.reduce.per_feature:Entropy",
        "fingerprint": "torchtap.reduce.elements:Fingerprint",
        "full": "torchtap.reduce.elements:Full",
        "gram": "torchtap.reduce.per_feature:Gram",
        "histogram": "torchtap.reduce.histogram:Histogram",
        "metric": "torchtap.reduce.metric:Metric",
        "quantiles": "torchtap.reduce.histogram:Quantiles",
        "sample": "torchtap.reduce.elements:Sample",
        "sample_spread": "torchtap.reduce.per_feature:SampleSpread",
        "stats": "torchtap.reduce.stats:Stats",
        "topk": "torchtap.reduce.elements:TopK",
        "units": "torchtap.reduce.per_feature:Units",
    },
    error=ReductionError,
)


def reduction_class(name: str) -> type[AnyReduction]:
    """Return the reduction class of this name: built in, registered, or of an installed package."""
    found = REDUCTIONS.load(name)
    if not (isinstance(found, type) and issubclass(found, Reduction)):
        raise ReductionError(
            f"the entry point {name!r} in {REDUCTIONS.group!r} is {found!r}, which is no Reduction"
        )
    return found


def reduction_from_spec(spec: Mapping[str, Any]) -> AnyReduction:
    """Return the reduction that ``spec()`` described, by its class's ``from_spec`` or its keyword parameters."""
    parameters = dict(spec)
    name = parameters.pop("reduction", None)
    if not isinstance(name, str):
        raise ReductionError(f"{dict(spec)!r} describes no reduction: it has no name under 'reduction'")
    made_by = reduction_class(name)
    from_spec = getattr(made_by, "from_spec", None)
    try:
        made = from_spec(parameters) if from_spec is not None else made_by(**parameters)
    except TypeError as error:
        raise ReductionError(f"the reduction {name!r} cannot be made from {parameters!r}: {error}") from error
    if not isinstance(made, Reduction):
        raise ReductionError(f"from_spec of the reduction {name!r} gave {made!r}, which is no Reduction")
    return made
