"""Norms over the last dimension, of tensors and of their differences, added up over all rows.

The native kernel, where it was built, reads each value once and makes no temporaries; torch operations give the same
numbers for whatever the kernel cannot read. It guarantees:
- 16-bit numbers are widened first: no norm overflows or is rounded to 16 bits;
- nothing is read from a device before `read`, and then each device once.

A tensor without dimensions is one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from torchtap.reduce.kernel import DTYPE_CODES
from torchtap.reduce.memory import located

__all__ = ["RowNorms", "native", "of_change", "of_steps", "read", "row_count"]

# Sums of norms: numbers, or a tensor of them that has not been read yet.
RowNorms = tuple[float, ...] | Tensor

_HALVES = frozenset({torch.float16, torch.bfloat16})
_READ_BY_KERNEL = frozenset({torch.float32, torch.float64, *_HALVES})


def _load() -> ModuleType | None:
    try:
        from torchtap.reduce import _rows
    except ImportError:
        return None
    # A checkout may still hold the build of an older source: it is as good as none.
    return _rows if hasattr(_rows, "sums") else None


native = _load()


def row_count(value: Tensor) -> int:
    """How many rows a tensor has."""
    return math.prod(value.shape[:-1])


def of_change(value: Tensor, other: Tensor) -> RowNorms:
    """The sums over rows of ``|value|`` and ``|value - other|``."""
    found = _by_kernel((value, other))
    if found is not None:
        return found
    with torch.no_grad():
        value, other = _wide(value), _wide(other)
        return _by_torch(value, value - other)


def of_steps(
    value: Tensor, between: Tensor, start: Tensor, biases: tuple[Tensor, Tensor] | None = None
) -> RowNorms:
    """The sums over rows of the two steps from ``start`` by ``between`` to ``value``, and of both ends.

    That is ``|value - between|``, ``|between - start|``, ``|value|`` and ``|start|``. ``biases`` are what is in every
    row of ``value``, and what is in every row of ``between`` and ``start``: both ends are then without them, and a
    fifth sum is that of ``value - between`` without them. (From the other step the bias cancels out.)
    """
    found = _by_kernel((value, between, start), biases or ())
    if found is not None:
        return found
    with torch.no_grad():
        value, between, start = _wide(value), _wide(between), _wide(start)
        steps = (value - between, between - start)
        if biases is None:
            return _by_torch(*steps, value, start)
        bias, start_bias = map(_wide, biases)
        value, between, start = value - bias, between - start_bias, start - start_bias
        return _by_torch(*steps, value, start, value - between)


def read(norms: Sequence[RowNorms]) -> list[tuple[float, ...]]:
    """All of these as numbers, with one read for each device."""
    waiting: dict[torch.device, list[int]] = {}
    for index, each in enumerate(norms):
        if isinstance(each, Tensor):
            waiting.setdefault(each.device, []).append(index)
    numbers = list(norms)
    for indices in waiting.values():
        tensors = [each for index in indices if isinstance(each := norms[index], Tensor)]
        joined = iter(torch.cat(tensors).tolist())
        for index, tensor in zip(indices, tensors, strict=True):
            numbers[index] = tuple(next(joined) for _ in range(len(tensor)))
    return numbers  # type: ignore[return-value]


def _by_kernel(values: tuple[Tensor, ...], biases: tuple[Tensor, ...] = ()) -> tuple[float, ...] | None:
    """The kernel's answer; None where it cannot read the memory as it is."""
    if native is None:
        return None
    first = values[0]
    shape, dtype = first.shape, first.dtype
    if not shape or dtype not in _READ_BY_KERNEL:
        return None
    addresses, held = [], []
    for index, each in enumerate(values + biases):
        wanted = shape if index < len(values) else shape[-1:]
        if each.dtype is not dtype or each.shape != wanted or not each.is_contiguous():
            return None
        place = located(each)
        if place is None:
            return None
        addresses.append(place[0])
        held.append(place[1])
    answer: tuple[float, ...] = native.sums(DTYPE_CODES[dtype], row_count(first), shape[-1], *addresses)
    held.clear()  # only now: the kernel may have let go of the interpreter
    return answer


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in _HALVES else value


def _by_torch(*values: Tensor) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(each, dim=-1).sum(dtype=_widest(each)) for each in values])


def _widest(value: Tensor) -> torch.dtype:
    return torch.float32 if value.device.type == "mps" else torch.float64
