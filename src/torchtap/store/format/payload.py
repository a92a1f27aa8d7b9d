"""From a tensor to the bytes that are written, without copying what need not be copied.

A contiguous CPU tensor of any dtype gives a view of its own memory. What has no single stretch of memory is
made contiguous first, and what it was is noted: strides of a transposed tensor, the layout of a sparse one
(kept as values and indices), the dtype of a quantized one (kept dequantized).

The view is made without torch's operations, ``is_conj`` and the like included: each of them lets go of the
interpreter's lock, and getting it back from a busy training thread takes longer than all else here.

Takes numpy arrays as well, so that a run can be written by a process that never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import numpy as np

from torchtap.store.format.checksum import kept_checksum
from torchtap.store.format.dtypes import BY_NAME, StoredType

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Payload", "lies_as_it_reads", "nbytes_of", "payload_of"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A tensor as bytes. ``buffer`` keeps the memory alive."""

    type: StoredType
    shape: tuple[int, ...]
    buffer: memoryview
    notes: dict[str, object] = field(default_factory=dict)
    indices: Payload | None = None  # of a sparse tensor, whose ``buffer`` then holds the values
    checksum: int | None = None  # of ``buffer``, where it is known already


def nbytes_of(value: np.ndarray | Tensor) -> int:
    """How much memory a tensor or an array holds on to, for the queue's accounts."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    try:
        return int(value.nbytes)
    except (
        RuntimeError,
        NotImplementedError,
        AttributeError,
    ):  # sparse and other layouts have no single size
        try:
            from torchtap._torch import sparse_bytes

            return sparse_bytes(value)
        except Exception:
            return int(value.numel()) * int(value.element_size())


def payload_of(value: np.ndarray | Tensor) -> Payload:
    """The bytes of a tensor or a numpy array."""
    if isinstance(value, np.ndarray):
        return _of_array(value)
    return _of_tensor(value)


def _of_array(value: np.ndarray) -> Payload:
    stored = BY_NAME.get(value.dtype.name)
    if stored is None:
        raise TypeError(f"a run holds no arrays of dtype {value.dtype}")
    shape = value.shape
    notes: dict[str, object] = {}
    if not value.flags.c_contiguous:
        notes["strides"] = [stride // value.itemsize for stride in value.strides]
    little = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False))
    return Payload(stored, shape, little.reshape(-1).view(np.uint8).data, notes)


def _of_tensor(value: Tensor) -> Payload:
    import torch

    notes: dict[str, object] = {}
    if value.is_quantized:
        notes["quantized"] = str(value.dtype).removeprefix("torch.")
        value = value.dequantize()
    if value.layout is not torch.strided:
        notes["layout"] = str(value.layout).removeprefix("torch.")
        if value.is_mkldnn:
            value = value.to_dense()
        else:
            sparse = value if value.layout is torch.sparse_coo else value.to_sparse()
            sparse = sparse.coalesce()
            values = _dense(sparse.values(), notes)
            notes["shape"] = list(sparse.shape)
            return Payload(values.type, values.shape, values.buffer, notes, _dense(sparse.indices(), {}))
    elif not value.is_contiguous():
        notes["strides"] = list(value.stride())
    return _dense(value, notes)


def lies_as_it_reads(value: Tensor) -> bool:
    """Whether the value's bytes, as they lie in the host's memory, are those of its contiguous copy."""
    from torchtap._torch import has_lazy_bits

    return value.is_cpu and value.is_contiguous() and not has_lazy_bits(value)


def _dense(value: Tensor, notes: dict[str, object]) -> Payload:
    stored = BY_NAME.get(str(value.dtype).removeprefix("torch."))
    if stored is None:
        raise TypeError(f"a run holds no tensors of dtype {value.dtype}")
    if not lies_as_it_reads(value):
        value = value.resolve_conj().resolve_neg().cpu().contiguous()
    buffer = np.asarray(_Memory(value)).data
    return Payload(stored, tuple(value.shape), buffer, notes, checksum=kept_checksum(value))


@final
class _Memory:
    """A contiguous tensor as numpy can look at it, whatever its dtype: as bytes. It keeps the tensor."""

    __slots__ = ("__array_interface__", "_value")

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (value.nbytes,),
            "data": (value.data_ptr(), True),  # nobody writes through it
        }
