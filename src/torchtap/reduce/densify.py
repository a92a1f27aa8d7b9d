"""Turn any tensor of a model into a plain one, and a plain one into an address that native code may read.

`densify` returns a detached, dense, non-conjugated ``torch.Tensor``. A DTensor becomes this rank's shard; sparse,
nested and quantized tensors become dense; wrappers of ``torch.func`` become the values of the whole batch. A tensor
without data (meta, fake, traced, uninitialized) and one that cannot be opened raise `ReductionError`.

`located` checks everything that C cannot: a plain strided CPU tensor without a lazy negation or conjugation, whose
storage exists and reaches as far as its sizes and strides say. (FSDP frees a storage by resizing it to zero; its views
still have addresses.) It returns the storage too: holding it keeps the memory while the interpreter's lock is released.
It cannot check that no other thread resizes or writes the storage meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage
from torch.nn.parameter import is_lazy

from torchtap._torch import FakeTensor, is_being_functionalized, without_transforms
from torchtap.errors import ReductionError

__all__ = ["COMPUTABLE", "PLAIN_TYPES", "densify", "densify_real", "has_memory", "holds_values", "located"]

PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Real number formats in which every torch op that is used here exists.
COMPUTABLE = frozenset({*_FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool})


def holds_values(value: Tensor) -> bool:
    """Return True if the tensor has data (False for meta, fake, traced and uninitialized tensors)."""
    if isinstance(value, FakeTensor) or is_lazy(value):
        return False
    return not (value.is_meta or is_being_functionalized(value))


def densify(value: Tensor) -> Tensor:
    """Return the value as a plain dense tensor, detached; a copy only if one is needed."""
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


def densify_real(value: Tensor) -> Tensor:
    """Do the same, and convert to a real number format that torch computes in; complex numbers to magnitudes."""
    value = densify(value)
    if value.dtype in COMPUTABLE:
        return value
    try:
        if value.dtype.is_complex:
            return (value.to(torch.complex64) if value.dtype is torch.complex32 else value).abs()
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
    """Return the plain tensor inside a subclass, by the method that the subclass has for it."""
    for unwrap in ("to_local", "wait", "get_data"):  # DTensor; an asynchronous collective; MaskedTensor
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


def located(value: Tensor) -> tuple[int, UntypedStorage] | None:
    """Return the address of a value and its storage; None if native code cannot read it where it is.

    The address of a value without elements may be zero.
    """
    if (
        type(value) not in PLAIN_TYPES
        or not value.is_cpu
        or value.layout is not torch.strided
        or value.is_neg()
        or (value.dtype.is_complex and value.is_conj())
    ):
        return None
    try:
        address = value.data_ptr()
        storage = value.untyped_storage()
    except RuntimeError:  # wrapped by a torch.func transform, or a quantized format
        return None
    size = value.element_size()
    if address % size or not _reaches(value, storage, address, size):
        return None
    return address, storage


def has_memory(value: Tensor) -> bool:
    """Return True if the whole storage of a dense tensor exists, or if torch cannot tell."""
    try:
        return _reaches(value, value.untyped_storage(), value.data_ptr(), value.element_size())
    except (RuntimeError, NotImplementedError):
        return True


def _reaches(value: Tensor, storage: UntypedStorage, address: int, size: int) -> bool:
    count = value.numel()
    if not count:
        return True
    if value.is_nested:
        return False
    if not value.is_contiguous():
        count = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    before = value.storage_offset() * size
    # An address that does not exceed the offset belongs to a storage that begins at zero.
    return address > before and before + count * size <= storage.nbytes()
