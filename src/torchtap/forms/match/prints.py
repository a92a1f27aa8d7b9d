"""What is remembered of a tensor to know it again: a digest of its bytes, and a few sums for one that is only near.

It guarantees:
- tensors with the same shape, type and values have the same print, whatever their strides or the sign of a zero;
- a print keeps no memory of the model's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from torchtap import Reduction

__all__ = ["Print", "Prints", "print_of"]

_NEAR = 1e-3  # of the values' own size


@final
@dataclass(frozen=True, slots=True)
class Print:
    """One tensor as it is known again."""

    digest: str
    shape: tuple[int, ...]
    dtype: str
    sums: tuple[float, ...] = ()

    def is_near(self, other: Print) -> bool:
        """Return True if the values are the same but for rounding, as far as the sums tell."""
        if (self.shape, self.dtype) != (other.shape, other.dtype) or not self.sums or not other.sums:
            return False
        size = max(self.sums[0], other.sums[0])
        return all(abs(a - b) <= _NEAR * size for a, b in zip(self.sums, other.sums, strict=True))

    @property
    def looks(self) -> tuple[tuple[int, ...], str]:
        """Shape and type."""
        return self.shape, self.dtype


def print_of(tensor: Tensor) -> Print:
    """The print of a tensor."""
    value = tensor.detach()
    if value.is_quantized:
        value = value.dequantize()
    if value.layout is not torch.strided:
        value = value.to_dense()
    flat = value.cpu().reshape(-1)
    dtype = str(flat.dtype)
    if flat.is_floating_point():
        flat = flat + 0.0 if flat.element_size() > 1 else flat.float()  # no negative zeros
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{dtype}{tuple(value.shape)}".encode())
    digest.update(flat.contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return Print(digest.hexdigest(), tuple(value.shape), dtype, _sums(flat))


def _sums(flat: Tensor) -> tuple[float, ...]:
    if not flat.is_floating_point() or not flat.numel():
        return ()
    wide = flat.double()
    if not bool(wide.isfinite().all()):
        return ()
    waves = torch.cos(torch.arange(wide.numel(), dtype=torch.float64))
    return float(wide.abs().sum()), float(wide.sum()), float(wide @ waves)


@final
@dataclass(frozen=True)
class Prints(Reduction[list[Print]]):
    """Keeps the prints of what passes."""

    name: ClassVar[str] = "prints"

    def update(self, state: list[Print] | None, value: Tensor) -> list[Print]:
        return [*(state or ()), print_of(value)]

    def merge(self, left: list[Print], right: list[Print]) -> list[Print]:
        return [*left, *right]

    def result(self, state: list[Print]) -> Any:
        return {"prints": state}

    def spec(self) -> dict[str, object]:
        return {"reduction": self.name}


def by_digest(found: Iterable[tuple[str, Print]]) -> dict[str, list[str]]:
    """Keys by the digest of their value, in order."""
    made: dict[str, list[str]] = {}
    for key, each in found:
        made.setdefault(each.digest, []).append(key)
    return made
