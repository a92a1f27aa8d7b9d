"""``Full``: the tensor itself, or a slice of it, as it was when it passed.

It guarantees:
- what is kept is a copy, which a later in-place change does not reach; or, with ``copy=False``, the tensor itself, and
  then a value that was changed since is an error and never another value;
- nothing waits for the device before ``result``: until then copies stay where the values were;
- several values join along the first dimension (numbers of no dimension become a vector), or say why they
  cannot.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from torchtap._torch import version_of
from torchtap.errors import ReductionError
from torchtap.reduce.base import Reduction, Result
from torchtap.reduce.kernel import is_sound
from torchtap.reduce.memory import has_memory
from torchtap.reduce.readable import readable
from torchtap.reduce.transforms import outside_transforms

__all__ = ["Full"]

_Part = int | builtins.slice | EllipsisType
_Index = tuple[_Part, ...]


@final
@dataclass(frozen=True)
class Full(Reduction[list["Tensor | _Reference"]]):
    """Keep whole tensors.

    dtype: convert to this (``torch.float16`` or ``"float16"``); None keeps it.
    slice: keep only this part, as Python would index it: ``"0:4, ..., ::2"``, ``(slice(0, 4), ..., 0)``, an
    int. device: where the result is; None leaves it on the value's device. copy: False keeps the model's own tensors in
    a `capture`. That costs no copy, but holds their memory, and what the model then changes in place is refused by
    name: torch's version counter tells. Values without one (inference mode) are copied all the same. What goes past
    the counter (``.data``, numpy) is not noticed.
    """

    name: ClassVar[str] = "full"
    whole: ClassVar[bool] = True

    dtype: torch.dtype | str | None = None
    slice: str | int | builtins.slice | tuple[Any, ...] | None = None
    device: str | None = "cpu"
    copy: bool = True
    _dtype: torch.dtype | None = field(init=False, repr=False, compare=False)
    _index: _Index | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # One spelling for each meaning, so that equal reductions compare, hash and print equal.
        dtype = _parse_dtype(self.dtype)
        index = _parse_index(self.slice)
        object.__setattr__(self, "dtype", None if dtype is None else str(dtype).removeprefix("torch."))
        object.__setattr__(self, "slice", None if index is None else ", ".join(map(_spell, index)))
        object.__setattr__(self, "device", None if self.device is None else str(self.device))
        object.__setattr__(self, "_dtype", dtype)
        object.__setattr__(self, "_index", index)

    @property
    def refers(self) -> bool:
        return not self.copy

    @outside_transforms
    def update(
        self,
        state: list[Tensor | _Reference] | None,
        value: Tensor,
        copy: Callable[[Tensor], Tensor] = torch.clone,
    ) -> list[Tensor | _Reference]:
        """``copy`` makes the copies of contiguous values on the host; it may have memory that was used before."""
        plain = readable(value) if value.requires_grad or not is_sound(value) else value
        if self._index is not None:
            plain = self._cut(plain, self._index)
        kept: Tensor | _Reference
        if self._dtype is not None:
            kept = plain.to(self._dtype, copy=True)
        elif not self.copy and (version := version_of(plain)) >= 0:
            kept = _Reference(plain.detach(), version)
        else:
            kept = copy(plain) if plain.is_cpu and plain.is_contiguous() else plain.clone()
        if state is None:
            return [kept]
        state.append(kept)
        return state

    def _cut(self, value: Tensor, index: _Index) -> Tensor:
        try:
            return value[index]
        except (IndexError, ValueError) as error:
            raise ReductionError(
                f"Full(slice={self.slice!r}) does not fit a value of shape {tuple(value.shape)}: {error}"
            ) from error

    def first(self, value: Tensor, copy: Callable[[Tensor], Tensor]) -> list[Tensor | _Reference]:
        return self.update(None, value, copy)

    def merge(
        self, left: list[Tensor | _Reference], right: list[Tensor | _Reference]
    ) -> list[Tensor | _Reference]:
        return left + right

    def result(self, state: list[Tensor | _Reference]) -> Result:
        kept = [each.value() if isinstance(each, _Reference) else each for each in state]
        first = kept[0]
        if len(kept) == 1:
            return {"value": self._placed(first)}
        for other in kept[1:]:
            if other.shape[1:] != first.shape[1:] or other.dim() != first.dim() or other.dtype != first.dtype:
                raise ReductionError(
                    f"Full cannot join values of shape {tuple(first.shape)} ({first.dtype}) and "
                    f"{tuple(other.shape)} ({other.dtype}): they differ in more than the first dimension; "
                    "keep one value for each step, or Full(slice=...) of the part that has one shape"
                )
        placed = [self._placed(each) for each in kept]
        return {"value": torch.cat(placed) if first.dim() else torch.stack(placed)}

    def spec(self) -> dict[str, object]:
        spec: dict[str, object] = {
            "reduction": self.name,
            "dtype": self.dtype,
            "slice": self.slice,
            "device": self.device,
        }
        return spec if self.copy else {**spec, "copy": False}

    def _placed(self, kept: Tensor) -> Tensor:
        return kept if self.device is None else kept.to(self.device)


@final
class _Reference:
    """A tensor of the model's, and how often it had been changed when it passed."""

    __slots__ = ("_changes", "_tensor")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self._tensor = tensor
        self._changes = version

    def value(self) -> Tensor:
        """The value that passed; an error where it is gone."""
        tensor = self._tensor
        if version_of(tensor) != self._changes or (tensor.numel() and not has_memory(tensor)):
            raise ReductionError(
                f"the value of shape {tuple(tensor.shape)} that passed here was changed in place afterwards, and "
                "Full(copy=False) keeps no copy; capture this site with Full()"
            )
        return tensor


def _parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ReductionError(f"Full(dtype={dtype!r}): torch has no such dtype; write for example 'float16'")
    return found


def _parse_index(text: str | int | builtins.slice | tuple[Any, ...] | None) -> _Index | None:
    if text is None:
        return None
    parts: list[Any] = list(text) if isinstance(text, tuple) else [text]
    if isinstance(text, str):
        try:
            parts = [_parse_part(part.strip()) for part in text.split(",")]
        except ValueError:
            parts = [text]
    for part in parts:
        if not isinstance(part, int | builtins.slice | EllipsisType) or isinstance(part, bool):
            raise ReductionError(
                f"Full(slice={text!r}): {part!r} is no part of an index; write it as Python indexes, '0:4, "
                "..., ::2'"
            )
    return tuple(parts)


def _parse_part(text: str) -> _Part:
    if text == "...":
        return ...
    if ":" not in text:
        return int(text)
    bounds = [int(bound) if bound.strip() else None for bound in text.split(":")]
    if len(bounds) > 3:
        raise ValueError(text)
    return builtins.slice(*bounds)


def _spell(part: _Part) -> str:
    if isinstance(part, builtins.slice):
        bounds = ["" if bound is None else str(bound) for bound in (part.start, part.stop, part.step)]
        return ":".join(bounds if bounds[2] else bounds[:2])
    return "..." if isinstance(part, EllipsisType) else str(part)
