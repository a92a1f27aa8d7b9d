"""Walk over tensors in small dense pieces, so that a comparison needs no memory of the tensors' own size.

It guarantees:
- the pieces come in row-major order and cover every element exactly once, whatever the strides;
- no piece is larger than asked for, and at most one piece for each tensor is copied at a time;
- tensors of any dtype come as something that converts exactly to float64 (complex as pairs of reals,
  quantized dequantized, sparse densified).

Not here: what is computed of a piece (`measures`, `profile`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchtap.errors import CompareError, ReductionError
from torchtap.reduce.readable import readable

__all__ = ["CHUNK", "as_real", "pieces"]

# Elements in a piece: small enough that a few of them, widened to float64, stay in a core's second-level cache.
CHUNK = 1 << 17


def as_real(value: Tensor) -> Tensor:
    """A strided tensor of a plain real dtype with the same information. Copies only what has no such view."""
    value = value.detach()
    if value.is_meta:
        raise CompareError(
            f"a tensor on the meta device has no values to compare (shape {tuple(value.shape)})"
        )
    if value.is_nested:
        raise CompareError(
            "a nested tensor has no single shape to compare; compare its components, or pad it with "
            "torch.nested.to_padded_tensor first"
        )
    try:
        value = readable(value)  # dense, opened, and with all of its memory
    except ReductionError as error:
        raise CompareError(f"a tensor of shape {tuple(value.shape)} cannot be compared: {error}") from error
    return torch.view_as_real(value) if value.is_complex() else value


def pieces(*values: Tensor, chunk: int = CHUNK) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield ``(offset, flat pieces)``: the same elements of each value, which all have one shape."""
    if not values or values[0].numel() == 0:
        return
    if all(value.is_contiguous() for value in values):
        flat = [value.view(-1) for value in values]
        for start in range(0, flat[0].numel(), chunk):
            yield start, tuple(each[start : start + chunk] for each in flat)
        return
    yield from _strided(values, 0, chunk)


def _strided(values: tuple[Tensor, ...], offset: int, chunk: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    shape = values[0].shape
    total = values[0].numel()
    if total <= chunk or not shape:
        yield offset, tuple(value.reshape(-1) for value in values)
        return
    inner = total // shape[0]
    if inner > chunk:
        for row in range(shape[0]):
            yield from _strided(tuple(value[row] for value in values), offset + row * inner, chunk)
        return
    rows = max(1, chunk // inner)
    for row in range(0, shape[0], rows):
        part = tuple(value[row : row + rows].reshape(-1) for value in values)
        yield offset + row * inner, part
