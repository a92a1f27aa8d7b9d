"""From a tensor to an address that native code may read, or to none. Every native call gets its addresses here.

``located`` vouches for all that C cannot check: a plain tensor (no wrapper, no fake, nothing of ``torch.func``),
strided, on the CPU, without a negation or a conjugation that is only noted, whose storage is there and reaches as far
as its sizes and strides say. (FSDP frees a storage by giving it the size zero; a view of it still has an address, and a
small one that is not zero.) It answers with the storage too: whoever holds it keeps the memory while the interpreter's
lock is let go.

What nobody can vouch for is another thread that resizes the storage or writes to it in the meantime.
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

__all__ = ["PLAIN_TYPES", "has_memory", "located"]

PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


def located(value: Tensor) -> tuple[int, UntypedStorage] | None:
    """Where a value lies, and what holds the memory; None where native code cannot read it as it lies.

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
    except RuntimeError:  # wrapped by a torch.func transform, or quantized in a way of its own
        return None
    size = value.element_size()
    if address % size or not _reaches(value, storage, address, size):
        return None
    return address, storage


def has_memory(value: Tensor) -> bool:
    """Whether the storage of a dense tensor is there, all of it. Says True where it cannot be asked."""
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
    # An address that is no more than the offset has a storage that begins at zero.
    return address > before and before + count * size <= storage.nbytes()
