"""From whatever a model hands around to a plain tensor that arithmetic can read.

``readable`` answers with a detached, dense, non-conjugated ``torch.Tensor``:
- a DTensor gives this rank's shard (states merge over ranks, values do not have to travel);
- sparse, nested and quantized tensors give their dense or float values;
- wrappers of ``torch.func`` transforms give the values underneath, of the whole batch;
- what holds no values at all (meta, fake, being traced, not yet made) raises ReductionError, and so does what
  cannot be opened: memory that is not there is never read.

``readable_real`` also turns complex numbers into magnitudes and number formats that torch cannot compute in
into float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torchtap._torch import FakeTensor, is_being_functionalized, without_transforms
from torchtap.errors import ReductionError
from torchtap.reduce.memory import PLAIN_TYPES, has_memory

__all__ = ["COMPUTABLE", "holds_values", "readable", "readable_real"]

# Real number formats in which every torch op that is used here exists.
COMPUTABLE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    }
)


def holds_values(value: Tensor) -> bool:
    """Whether there are numbers behind a tensor, or only a shape, or not even that."""
    if isinstance(value, FakeTensor) or is_lazy(value):
        return False
    return not (value.is_meta or is_being_functionalized(value))


def readable(value: Tensor) -> Tensor:
    """The value as a plain dense tensor, detached; not a copy where none is needed."""
    kind = type(value).__name__
    try:
        plain = _opened(value)
    except ReductionError:
        raise
    except Exception as error:
        raise ReductionError(
            f"a value of type {kind} cannot be read as a plain tensor ({error}); use Metric with a function "
            "that can"
        ) from error
    if plain.numel() and not has_memory(plain):
        raise ReductionError(
            f"a value of type {kind} and shape {tuple(plain.shape)} has no memory of its own: it is a "
            "wrapper, or its storage was freed or made too small; use Metric with a function that can read it"
        )
    return plain


def readable_real(value: Tensor) -> Tensor:
    """As `readable`, in a real number format that torch computes in."""
    value = readable(value)
    if value.dtype in COMPUTABLE:
        return value
    try:
        if value.dtype.is_complex:
            if value.dtype is torch.complex32:
                value = value.to(torch.complex64)
            return value.abs()
        return value.to(torch.float32 if value.dtype.is_floating_point else torch.float64)
    except (RuntimeError, TypeError) as error:
        raise ReductionError(
            f"values of type {value.dtype} cannot be turned into numbers ({error}); use Metric with a "
            "function that can"
        ) from error


def _opened(value: Tensor) -> Tensor:
    _refuse_without_values(value)
    if type(value) not in PLAIN_TYPES:
        value = _without_subclass(value)
    while (inside := without_transforms(value)) is not None:
        value = inside
        _refuse_without_values(value)
    value = value.detach()
    if value.is_nested:
        value = value.values()
    if value.layout is not torch.strided:
        value = value.to_dense()
    if value.is_quantized:
        value = value.dequantize()
    if value.is_complex():
        value = value.resolve_conj()
    return value.resolve_neg() if value.is_neg() else value


def _refuse_without_values(value: Tensor) -> None:
    if not holds_values(value):
        what = (
            "an uninitialized parameter" if is_lazy(value) else f"a {type(value).__name__} on {value.device}"
        )
        raise ReductionError(
            f"{what} has no values to reduce: the model is being traced, lives on the meta device or was never "
            "run; record while it runs on real data"
        )


def _without_subclass(value: Tensor) -> Tensor:
    """The plain tensor inside a subclass, by what the subclass offers for that."""
    for unwrap in ("to_local", "wait", "get_data"):  # DTensor; a collective under way; MaskedTensor
        method = getattr(value, unwrap, None)
        if callable(method):
            return _opened(method())
    if value.is_nested:
        return _opened(value.values())
    if hasattr(value, "__tensor_flatten__"):
        inner = value.dequantize()  # quantized weights of other packages
        if type(inner) in PLAIN_TYPES:
            return inner
    return value.detach().as_subclass(Tensor)
