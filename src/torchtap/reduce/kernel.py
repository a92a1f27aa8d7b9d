"""The native kernel where it was built, and the way in: from a tensor to an address, or not at all.

``native`` is the compiled module or ``None``; everything that uses it has a torch path beside it. What raw memory may
be read, `memory` says: for anything else ``measure`` answers False and has read nothing.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torchtap.reduce.memory import PLAIN_TYPES, located
from torchtap.reduce.moments import WIDTH

__all__ = [
    "DTYPES",
    "DTYPE_CODES",
    "MANY",
    "SMALL",
    "count",
    "is_sound",
    "make_taker",
    "measure",
    "native",
    "share_threads",
]


_FUNCTIONS = ("count", "fold", "measure", "measure_strided", "measure_tensor", "Taker", "use_pool")


def _load() -> ModuleType | None:
    try:
        from torchtap.reduce import _native
    except ImportError:
        return None
    # A checkout may still hold the build of an older source: it is as good as none.
    current = all(hasattr(_native, name) for name in _FUNCTIONS)
    return _native if current and getattr(_native, "FIELDS", 0) == WIDTH else None


native = _load()


def share_threads(kernel: ModuleType) -> None:
    """Let the kernel read large tensors with torch's own threads, where torch has them from GNU's OpenMP."""
    try:
        run = ctypes.CDLL(None).GOMP_parallel
    except (OSError, TypeError, AttributeError):
        return  # other threads, or a platform without a common name space: the kernel starts its own
    kernel.use_pool(ctypes.cast(run, ctypes.c_void_p).value)


if native is not None and hasattr(os, "register_at_fork"):
    share_threads(native)
    # In a forked child the threads are gone, and OpenMP would wait for them for ever.
    os.register_at_fork(after_in_child=partial(native.use_pool, 0))


def _takes_tensors() -> bool:
    """Whether tensors tell the kernel themselves where they lie: torch from 2.10 on has DLPack's exchange interface."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    # A checkout may still hold the build of an older source.
    if exchange is None or not hasattr(getattr(native, "Taker", None), "put_each"):
        return False
    tensor = torch.zeros(())
    storage = tensor.untyped_storage()
    if len(storage) != tensor.nbytes:
        return False
    asked = tensor.is_neg, tensor.is_inference, tensor.untyped_storage, storage.data_ptr
    return bool(native.use_tensors(exchange, tuple(PLAIN_TYPES), asked))  # type: ignore[union-attr]


_has_takers = _takes_tensors()


def make_taker() -> Any:
    """What takes tensors as they are into rows (`_native_taking.h`); None where there is no such thing."""
    return native.Taker(MANY) if native is not None and _has_takers else None


# Below so many bytes torch's allocator itself uses memory again: an ordinary copy costs least.
SMALL = 64 << 10


def is_sound(value: Tensor) -> bool:
    """Whether a value is plain memory of real numbers on the host, all of it there: what `readable` makes of others."""
    if native is None or not _has_sound:
        return False
    sound: bool = native.is_sound(value)
    return sound


_has_sound = _has_takers and hasattr(native, "is_sound")


# The numbers by which `_native.c` knows the dtypes.
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
}

DTYPES = list(DTYPE_CODES)

# More elements than this are shared out to threads; for less than this, one thread is done sooner.
MANY = 1 << 17


def measure(kernel: ModuleType, address: int, value: Tensor, *, row: int = 0) -> bool:
    """Write the state of ``value`` to ``address`` and fold it into ``row``, if that is another address.

    False where its memory cannot be read as it is.
    """
    if _has_takers and kernel.measure_tensor(row, address, value, MANY, torch.get_num_threads()):
        return True
    code = DTYPE_CODES.get(value.dtype)
    place = located(value) if code is not None else None
    if code is None or place is None:
        return False
    pointer, storage = place  # held, so that it stays while the kernel lets go of the interpreter
    count = value.numel()
    threads = torch.get_num_threads() if count > MANY else 1
    if value.is_contiguous():
        kernel.measure(address, pointer, count, code, threads)
    else:
        kernel.measure_strided(address, pointer, code, threads, value.shape, value.stride())
    del storage
    if row:
        kernel.fold(row, address)
    return True


def count(
    value: Tensor, counts: Tensor, *, edges: Tensor | None = None, octaves: tuple[int, int, int] = (0, 0, 0)
) -> bool:
    """Add to ``counts`` how many elements are in each bin; False where the kernel cannot read the value.

    Bins are between float64 ``edges``, or those of an octave grid: its lowest and highest exponent and the bits that
    cut an octave.
    """
    code = DTYPE_CODES.get(value.dtype)
    place = located(flat := value.contiguous()) if native is not None and code is not None else None
    if native is None or place is None:
        return False
    pointer, storage = place
    at, bins = (0, 0) if edges is None else (edges.data_ptr(), len(edges) - 1)
    native.count(counts.data_ptr(), pointer, flat.numel(), code, at, bins, *octaves)
    del storage
    return True
