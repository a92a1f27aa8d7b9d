"""From whatever a model hands around to a plain tensor that arithmetic can read.

``readable`` answers with a detached, dense, non-conjugated ``torch.Tensor``:
- a DTensor gives this rank's shard (states merge over ranks, values do not have to travel);
- sparse, nested and quantized tensors give their dense or float values;
- wrappers of ``torch.func`` transforms give the values underneath, of the whole batch;
- what holds no values at all (meta, fake, being traced) raises ReductionError.

``readable_real`` also turns complex numbers into magnitudes and number formats that torch cannot compute in
into float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torchtap.errors import ReductionError

__all__ = ["COMPUTABLE", "PLAIN_TYPES", "holds_values", "readable", "readable_real"]

PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})

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
    """Whether there are numbers behind a tensor, or only a shape."""
    return not (isinstance(value, FakeTensor) or value.is_meta or torch._is_functional_tensor(value))


def readable(value: Tensor) -> Tensor:
    """The value as a plain dense tensor, detached; not a copy where none is needed."""
    kind = type(value).__name__
    if type(value) not in PLAIN_TYPES:
        value = _without_subclass(value)
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    if not holds_values(value):
        raise ReductionError(
            f"a {type(value).__name__} of shape {tuple(value.shape)} on {value.device} has no values to "
            "reduce: the model is being traced or lives on the meta device; record while it runs on real data"
        )
    value = value.detach()
    if value.is_nested:
        value = value.values()
    if value.layout is not torch.strided:
        value = value.to_dense()
    if value.is_quantized:
        value = value.dequantize()
    value = value.resolve_conj().resolve_neg()
    if value.numel() and not value.data_ptr():
        raise ReductionError(
            f"a value of type {kind} and shape {tuple(value.shape)} has no memory of its own: it is a "
            "wrapper, or its storage was freed; use Metric with a function that can read it"
        )
    return value


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


def _without_subclass(value: Tensor) -> Tensor:
    """The plain tensor inside a subclass, by what the subclass offers for that."""
    if isinstance(value, FakeTensor):
        return value  # refused by the caller, with its shape
    for unwrap in ("to_local", "wait"):  # DTensor; a collective's result that is still on its way
        method = getattr(value, unwrap, None)
        if callable(method):
            return readable(method())
    if value.is_nested:
        return readable(value.values())
    if hasattr(value, "__tensor_flatten__"):
        try:
            inner = value.dequantize()
        except Exception as error:
            raise ReductionError(
                f"a {type(value).__name__} keeps its values behind a tensor subclass that cannot be opened "
                f"({error}); use Metric with a function that can read it"
            ) from error
        if type(inner) in PLAIN_TYPES:
            return inner
    return value.detach().as_subclass(Tensor)
