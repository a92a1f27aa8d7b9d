"""``Metric``: any function of a tensor, and how its results combine.

It guarantees:
- the function gets the value detached and without autograd, and must not change it;
- of a value that is sharded over ranks it gets this rank's part, so that no rank waits for another;
- a result that shares the value's memory is copied;
- every error in the function becomes a `ReductionError` that names the metric.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from torchtap._torch import version_of
from torchtap._torch_distributed import local_part
from torchtap.errors import ReductionError
from torchtap.reduce.densify import PLAIN_TYPES, densify, holds_values
from torchtap.reduce.reduction import Reduction, Result, outside_transforms

__all__ = ["Metric"]

_WAYS = ("mean", "sum", "min", "max", "last")
_Answer = float | Tensor
_Aggregate = str | Callable[[list[Any]], Any]


class _Fold(NamedTuple):
    values: int
    kept: list[_Answer]  # one combined answer; all of them where a function combines


@final
@dataclass(frozen=True, init=False)
class Metric(Reduction[_Fold]):
    """``fn(value)``, a number or a tensor, for each value.

    aggregate: how the answers of several values combine: ``"mean"``, ``"sum"``, ``"min"``, ``"max"``
        (element by element for tensors), ``"last"``, or a function of the list of all answers.
    name: what the result is called; the function's own name if it is not given.
    whole: give the function the DTensor itself, not this rank's part of it. What it computes may then be a collective:
        every rank has to be watched, at the same steps, or the training waits for ever.
    """

    name: ClassVar[str] = "metric"

    fn: Callable[[Tensor], Any]
    aggregate: _Aggregate = "mean"
    label: str = field(default="")
    of_whole: bool = False

    def __init__(
        self,
        fn: Callable[[Tensor], Any],
        aggregate: _Aggregate = "mean",
        *,
        name: str | None = None,
        whole: bool = False,
    ) -> None:
        label = name or getattr(fn, "__name__", type(fn).__name__)
        if not callable(fn):
            raise ReductionError(f"Metric({fn!r}): give a function that takes a tensor")
        if not callable(aggregate) and aggregate not in _WAYS:
            raise ReductionError(
                f"metric {label!r}: aggregate={aggregate!r} is none of {_WAYS} and no function of a list"
            )
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "aggregate", aggregate)
        object.__setattr__(self, "label", label)
        object.__setattr__(self, "of_whole", whole)

    @outside_transforms
    def update(self, state: _Fold | None, value: Tensor) -> _Fold:
        seen = _Fold(1, [self._ask(value)])
        return seen if state is None else self.merge(state, seen)

    def merge(self, left: _Fold, right: _Fold) -> _Fold:
        values = left.values + right.values
        if callable(self.aggregate):
            return _Fold(values, left.kept + right.kept)
        before, after = left.kept[0], right.kept[0]
        if self.aggregate == "last":
            return _Fold(values, [after])
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            if before.shape != after.shape:
                raise self._failure(
                    f"gave shapes {tuple(before.shape)} and {tuple(after.shape)}, which do not combine"
                )
            after = after.to(before.device)
        if self.aggregate in ("mean", "sum"):
            return _Fold(values, [before + after])
        return _Fold(values, [_extreme(before, after, smallest=self.aggregate == "min")])

    def result(self, state: _Fold) -> Result:
        if callable(self.aggregate):
            try:
                combined = self._checked(self.aggregate(list(state.kept)))
            except ReductionError:
                raise
            except Exception as error:
                raise self._failure(f"could not be aggregated: {error!r}") from error
        else:
            combined = state.kept[0]
            if self.aggregate == "mean":
                combined = combined / state.values
        if isinstance(combined, Tensor):
            # A number stays on its device: all numbers of a step come to the host together.
            return {self.label: combined if combined.dim() == 0 else combined.to("cpu")}
        return {self.label: combined}

    def spec(self) -> dict[str, object]:
        place = getattr(self.fn, "__module__", "?")
        function = f"{place}:{getattr(self.fn, '__qualname__', type(self.fn).__name__)}"
        way = self.aggregate if isinstance(self.aggregate, str) else "function"
        spec: dict[str, object] = {
            "reduction": self.name,
            "name": self.label,
            "function": function,
            "aggregate": way,
        }
        return {**spec, "whole": True} if self.of_whole else spec

    @classmethod
    def from_spec(cls, parameters: Mapping[str, Any]) -> Metric:
        """Refused: a spec may come from anywhere, and naming a function must not be enough to run it."""
        raise ReductionError(
            f"the metric {parameters.get('name')!r} cannot be made from its description, since its function "
            f"{parameters.get('function')!r} is code; make it with Metric(fn, ...)"
        )

    def _ask(self, value: Tensor) -> _Answer:
        if not self.of_whole:
            value = local_part(value)
        # A subclass may be just what the function is for; what has no values is refused as everywhere.
        special = type(value) not in PLAIN_TYPES and holds_values(value)
        given = value.detach() if special else densify(value)
        before = version_of(given)
        try:
            with torch.no_grad():
                answer = self.fn(given)
        except Exception as error:
            raise self._failure(
                f"raised {error!r} on a value of shape {tuple(value.shape)} ({value.dtype})"
            ) from error
        if version_of(given) != before:
            raise self._failure("changed the value in place; let it work on a copy")
        checked = self._checked(answer)
        if isinstance(checked, Tensor) and _shares_memory(checked, given):
            return checked.clone()
        return checked

    def _checked(self, answer: Any) -> _Answer:
        if isinstance(answer, Tensor) and not answer.is_complex():
            # Wide, because sums of halves or of small integers would not add up.
            return answer.detach().to(torch.float32 if answer.device.type == "mps" else torch.float64)
        if isinstance(answer, numbers.Real):  # NumPy's numbers too
            return float(answer)
        what = f"a {answer.dtype} tensor" if isinstance(answer, Tensor) else repr(answer)[:80]
        raise self._failure(f"gave {what}; it has to give a real number or a tensor of such")

    def _failure(self, what: str) -> ReductionError:
        return ReductionError(f"metric {self.label!r} {what}")


def _extreme(left: _Answer, right: _Answer, *, smallest: bool) -> _Answer:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        pick = torch.minimum if smallest else torch.maximum
        return pick(torch.as_tensor(left), torch.as_tensor(right))
    return min(left, right) if smallest else max(left, right)


def _shares_memory(answer: Tensor, given: Tensor) -> bool:
    try:
        return answer.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse and wrapped tensors have no storage to compare
        return True
