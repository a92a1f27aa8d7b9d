"""The native kernel, if it was built. ``native`` is the compiled module or ``None``; torch ops are the fallback.

`densify.located` decides which memory may be read. For anything else the functions return False and have read nothing.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torchtap.reduce.densify import PLAIN_TYPES, located
from torchtap.reduce.moments import WIDTH

__all__ = [
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

_FUNCTIONS = (
    "Taker", "blank_rows", "count", "finish_rows", "fold", "is_sound", "measure", "measure_strided", "use_pool",
    "use_tensors",
)  # fmt: skip
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
# Tensors of more elements are divided among threads; for fewer, one thread is faster.
MANY = 1 << 17
# Below this number of bytes torch's allocator reuses memory itself, so an ordinary copy is the cheapest.
SMALL = 64 << 10


def _load() -> ModuleType | None:
    try:
        from torchtap.reduce import _native
    except ImportError:
        return None
    # A checkout may still have the build of an older source, which is not used.
    current = all(hasattr(_native, name) for name in _FUNCTIONS)
    return _native if current and getattr(_native, "FIELDS", 0) == WIDTH else None


native = _load()


def share_threads(kernel: ModuleType) -> None:
    """Let the kernel read large tensors with torch's own threads, if torch uses GNU's OpenMP."""
    try:
        run = ctypes.CDLL(None).GOMP_parallel
    except (OSError, TypeError, AttributeError):
        return  # other threads, or a platform without a common name space: the kernel starts its own
    kernel.use_pool(ctypes.cast(run, ctypes.c_void_p).value)


if native is not None and hasattr(os, "register_at_fork"):
    share_threads(native)
    # A forked child has none of these threads, and OpenMP would wait for them forever.
    os.register_at_fork(after_in_child=partial(native.use_pool, 0))


def _takes_tensors() -> bool:
    """Return True if the kernel can locate tensors itself, by DLPack's exchange interface (torch 2.10 and newer)."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None or native is None:
        return False
    tensor = torch.zeros(())
    storage = tensor.untyped_storage()
    if len(storage) != tensor.nbytes:
        return False
    methods = tensor.is_neg, tensor.is_inference, tensor.untyped_storage, storage.data_ptr
    return bool(native.use_tensors(exchange, tuple(PLAIN_TYPES), methods))


_has_takers = _takes_tensors()


def make_taker() -> Any:
    """Return a `Taker`, which folds tensors into rows in one call (`_native_taking.h`), or None."""
    return native.Taker(MANY) if native is not None and _has_takers else None


def is_sound(value: Tensor) -> bool:
    """Return True if `densify` would return the value unchanged: plain real numbers on the host, all there."""
    return native is not None and _has_takers and bool(native.is_sound(value))


def measure(kernel: ModuleType, address: int, value: Tensor) -> bool:
    """Write the state of ``value`` to ``address``. Return False if its memory cannot be read in place."""
    code = DTYPE_CODES.get(value.dtype)
    place = located(value) if code is not None else None
    if code is None or place is None:
        return False
    pointer, storage = place  # held while the kernel releases the interpreter's lock
    count = value.numel()
    threads = torch.get_num_threads() if count > MANY else 1
    if value.is_contiguous():
        kernel.measure(address, pointer, count, code, threads)
    else:
        kernel.measure_strided(address, pointer, code, threads, value.shape, value.stride())
    del storage
    return True


def count(
    value: Tensor, counts: Tensor, *, edges: Tensor | None = None, log_bins: tuple[int, int, int] = (0, 0, 0)
) -> bool:
    """Add the number of elements in each bin to ``counts``. Return False if the kernel cannot read the value.

    Bins are between float64 ``edges``, or logarithmic: lowest and highest exponent, and the bits that divide an octave.
    """
    code = DTYPE_CODES.get(value.dtype)
    place = located(flat := value.contiguous()) if native is not None and code is not None else None
    if native is None or place is None:
        return False
    pointer, storage = place
    at, bins = (0, 0) if edges is None else (edges.data_ptr(), len(edges) - 1)
    native.count(counts.data_ptr(), pointer, flat.numel(), code, at, bins, *log_bins)
    del storage
    return True
