"""Reductions that keep elements: ``Full``, ``Sample`` and ``TopK``; and ``Fingerprint``, which identifies them."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from types import EllipsisType
from typing import Any, ClassVar, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from torchtap._torch import version_of
from torchtap.errors import ReductionError
from torchtap.reduce.densify import COMPUTABLE, densify, densify_real, has_memory
from torchtap.reduce.kernel import is_sound
from torchtap.reduce.reduction import Reduction, Result, outside_transforms

__all__ = ["Fingerprint", "Full", "Sample", "TopK"]

_Part = int | builtins.slice | EllipsisType
_Index = tuple[_Part, ...]
_Kept: TypeAlias = "list[Tensor | _Reference]"


@final
@dataclass(frozen=True)
class Full(Reduction["_Kept"]):
    """Keep whole tensors, or a slice of them. Several values are joined along the first dimension.

    Copies stay on the value's device until ``result``, so nothing waits for the device.

    dtype: convert to this (``torch.float16`` or ``"float16"``); None keeps it.
    slice: keep only this part, as Python would index it: ``"0:4, ..., ::2"``, ``(slice(0, 4), ..., 0)``, an int.
    device: the device of the result; None leaves it on the value's device.
    copy: False keeps the model's own tensors in a `capture`. That holds their memory instead of copying it. If the
        model then changes one in place, reading it raises an error (torch's version counter shows it; changes through
        ``.data`` and numpy are not noticed). Values without a counter (inference mode) are copied.
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
        self, state: _Kept | None, value: Tensor, copy: Callable[[Tensor], Tensor] = torch.clone
    ) -> _Kept:
        """Keep one more value. ``copy`` copies contiguous values on the host, perhaps into pooled memory."""
        plain = densify(value) if value.requires_grad or not is_sound(value) else value
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

    def first(self, value: Tensor, copy: Callable[[Tensor], Tensor]) -> _Kept:
        return self.update(None, value, copy)

    def merge(self, left: _Kept, right: _Kept) -> _Kept:
        return left + right

    def result(self, state: _Kept) -> Result:
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
        spec = {"reduction": self.name, "dtype": self.dtype, "slice": self.slice, "device": self.device}
        return {**spec} if self.copy else {**spec, "copy": False}

    def _placed(self, kept: Tensor) -> Tensor:
        return kept if self.device is None else kept.to(self.device)


@final
class _Reference:
    """A tensor of the model, and its version when it was received."""

    __slots__ = ("_changes", "_tensor")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self._tensor = tensor
        self._changes = version

    def value(self) -> Tensor:
        """Return the tensor; raise `ReductionError` if it was changed since."""
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


_Samples = tuple[list[Tensor], list[Tensor]]  # values and positions
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
@dataclass(frozen=True)
class Sample(Reduction[_Samples]):
    """``n`` elements of each value (all of them if there are fewer), drawn without repetition.

    Positions depend on the number of elements and the seed alone. So every step, rank and run reads the same elements
    of values of one size. The result has ``values`` and ``positions``, the flat index of each in its own value; several
    values follow one after the other.
    """

    name: ClassVar[str] = "sample"

    n: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or self.seed < 0:
            raise ReductionError(
                f"Sample(n={self.n}, seed={self.seed}): n is the number of elements to keep, at least 1, "
                "and the seed is not negative"
            )

    @outside_transforms
    def update(self, state: _Samples | None, value: Tensor) -> _Samples:
        plain = densify(value)
        positions = _positions(plain.numel(), self.n, self.seed)
        # Indexed by coordinates: flattening would copy a value that does not lie in one piece.
        at = torch.unravel_index(positions, plain.shape) if plain.dim() and plain.numel() else ...
        taken = _as_bits(plain)[at].reshape(-1).clone().view(plain.dtype)
        if state is None:
            return [taken], [positions]
        state[0].append(taken)
        state[1].append(positions)
        return state

    def merge(self, left: _Samples, right: _Samples) -> _Samples:
        return left[0] + right[0], left[1] + right[1]

    def result(self, state: _Samples) -> Result:
        values = _joined([taken.to("cpu") for taken in state[0]])
        return {"values": values, "positions": torch.cat(state[1])}

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "n": self.n, "seed": self.seed}


def _as_bits(value: Tensor) -> Tensor:
    """Return the same memory as integers: not every torch can index or join float8 and unsigned numbers."""
    return value.view(_BITS.get(value.element_size(), value.dtype))


def _joined(values: list[Tensor]) -> Tensor:
    """Return all values one after the other; of several dtypes, in the one that holds them all."""
    if len({value.dtype for value in values}) > 1:
        return torch.cat(values)
    return torch.cat([_as_bits(value) for value in values]).view(values[0].dtype)


@lru_cache(maxsize=1024)
def _positions(count: int, n: int, seed: int) -> Tensor:
    if count <= n:
        return torch.arange(count)
    draw = np.random.Generator(np.random.PCG64([seed, count]))
    return torch.from_numpy(np.sort(draw.choice(count, n, replace=False, shuffle=False)))


_ORDERS = ("abs", "largest", "smallest")


class _Top(NamedTuple):
    values: Tensor
    indices: Tensor
    length: int  # elements seen so far


@final
@dataclass(frozen=True)
class TopK(Reduction[_Top]):
    """The first ``k`` elements ordered ``by`` magnitude (``"abs"``), ``"largest"`` or ``"smallest"``.

    The result has ``values`` and ``indices``, in order. Indices are flat and continue from one value to the next. Of
    equal elements the first is kept (on devices other than the CPU torch decides, because looking would wait for the
    device). NaN is never among them.
    """

    name: ClassVar[str] = "topk"

    k: int = 10
    by: str = "abs"

    def __post_init__(self) -> None:
        if self.k < 1 or self.by not in _ORDERS:
            raise ReductionError(
                f"TopK(k={self.k}, by={self.by!r}): k is at least 1 and by is one of {_ORDERS}"
            )

    @outside_transforms
    def update(self, state: _Top | None, value: Tensor) -> _Top:
        flat = densify_real(value).reshape(-1)
        if flat.dtype is torch.bool:
            flat = flat.to(torch.uint8)
        chosen = self._first(flat)
        seen = _Top(flat[chosen], chosen, flat.numel())
        return seen if state is None else self.merge(state, seen)

    def merge(self, left: _Top, right: _Top) -> _Top:
        device = left.values.device
        values = torch.cat([left.values, right.values.to(device)])
        indices = torch.cat([left.indices, right.indices.to(device) + left.length])
        # Of equals the one from the left is first: it is first in the concatenation too.
        chosen = self._first(values)
        return _Top(values[chosen], indices[chosen], left.length + right.length)

    def result(self, state: _Top) -> Result:
        values, indices = state.values.to("cpu"), state.indices.to("cpu")
        numbers = ~values.isnan()
        return {"values": values[numbers], "indices": indices[numbers]}

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name, "k": self.k, "by": self.by}

    def _first(self, flat: Tensor) -> Tensor:
        """Return the positions of the first k elements, in order."""
        key = self._key(flat)
        if flat.device.type != "cpu":
            if key.is_floating_point():
                key = torch.where(key.isnan(), -torch.inf, key)
            return torch.topk(key, min(self.k, key.numel())).indices
        k = min(self.k, key.numel())
        if k == 0:
            return torch.zeros(0, dtype=torch.int64)
        # One more than k shows whether others equal the last one; NaN would be in front.
        top, candidates = torch.topk(key, min(k + 1, key.numel()))
        if top.isnan().any():
            numbers = (~key.isnan()).nonzero().reshape(-1)
            return numbers[self._first(flat[numbers])]
        if len(top) > k and top[k] == top[k - 1]:
            ahead = (key > top[k]).nonzero().reshape(-1)
            level = (key == top[k]).nonzero().reshape(-1)
            candidates = torch.cat([ahead, level[: k - len(ahead)]])
        candidates = candidates[:k].sort().values
        return candidates[torch.sort(key[candidates], descending=True, stable=True).indices]

    def _key(self, flat: Tensor) -> Tensor:
        """Return numbers that are larger for elements that are earlier in the order."""
        if not flat.is_floating_point():
            # Wide enough that no magnitude overflows. (Beyond 2**53 neighbours in int64 become equal.)
            flat = flat.double() if flat.dtype is torch.int64 else flat.long()
        return {"abs": flat.abs, "largest": flat.clone, "smallest": flat.neg}[self.by]()


_STRETCH = 1 << 16  # elements whose keys are cached; the sums of stretches are mixed with their numbers
_MIX = -7046029254386353131  # an odd number, 2**64 over the golden ratio
_ORDER = 6364136223846793005
_DROPPED = 12  # bits: the rest is an integer that a float64 holds exactly


class _Prints(NamedTuple):
    values: int
    bits: Tensor  # int64
    projection: Tensor  # float64


@final
@dataclass(frozen=True, slots=True)
class Fingerprint(Reduction[_Prints]):
    """Two numbers that identify a value, element by element. Statistics do not change when elements change places.

    ``fingerprint``: the bits of each element times a key of its place, summed as wrapping integers. It is the same on
    every machine, and different if any bit, place or the shape differs.
    ``projection``: the elements times weights of their places, summed. It is linear, up to rounding, so an average over
    ranks, or a weight and its update, can be checked without the values.
    """

    name: ClassVar[str] = "fingerprint"

    @outside_transforms
    def update(self, state: _Prints | None, value: Tensor) -> _Prints:
        plain = densify(value)
        flat = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
        bits = torch.zeros((), dtype=torch.int64, device=flat.device)
        projection = torch.zeros((), dtype=torch.float64, device=flat.device)
        keys, weights = _keys(str(flat.device))
        for number, stretch in enumerate(flat.split(_STRETCH)):
            count = len(stretch)
            own = _dot(stretch.view(_BITS[stretch.element_size()]).long(), keys[:count])
            bits = bits * _MIX + own if number else own
            if stretch.dtype not in COMPUTABLE:
                stretch = stretch.float()
            part = _dot(stretch.double(), weights[:count])
            # Each stretch has a factor, or stretches that change places would go unnoticed.
            projection = projection + part * (1 + number * 0.6180339887 % 1) if number else part
        # The same elements in rows of another length are another matrix.
        bits = bits * _MIX + _of_shape(tuple(plain.shape))
        seen = _Prints(1, bits, projection)
        return seen if state is None else self.merge(state, seen)

    def merge(self, left: _Prints, right: _Prints) -> _Prints:
        factor = _signed(pow(_ORDER, right.values, 1 << 64))  # so that the order of values counts
        bits = left.bits.to(right.bits.device) * factor + right.bits
        total = left.projection.to(right.projection.device) + right.projection
        return _Prints(left.values + right.values, bits, total)

    def result(self, state: _Prints) -> Result:
        return {"fingerprint": (state.bits >> _DROPPED).double(), "projection": state.projection}

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name}


def _dot(left: Tensor, right: Tensor) -> Tensor:
    # Other devices have no dot product of integers.
    return torch.dot(left, right) if left.device.type == "cpu" else (left * right).sum()


def _of_shape(shape: tuple[int, ...]) -> int:
    mixed = len(shape)
    for size in shape:
        mixed = (mixed * _ORDER + size) % (1 << 64)
    return _signed(mixed)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


@lru_cache(maxsize=8)
def _keys(device: str) -> tuple[Tensor, Tensor]:
    """Return odd keys and weights of the places in a stretch; the same in every process and on every machine."""
    with torch.inference_mode(False), torch.no_grad():
        source = torch.Generator().manual_seed(20)
        halves = torch.randint(0, 1 << 32, (2, _STRETCH), generator=source, dtype=torch.int64)
        keys = (halves[0] << 32 ^ halves[1]) | 1
        weights = (halves[0].double() / (1 << 31)) - 1
        return keys.to(device), weights.to(device)
