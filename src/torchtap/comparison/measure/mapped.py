"""Tensors whose memory is a mapped file: give pages back once they were read, so that they do not pile up.

A mapped file costs no memory of its own, but every page that was touched counts as the process's until the kernel
takes it back. It guarantees:
- only memory that `mapped` was told of is ever given back, and only while that tensor lives;
- what was given back is read from the file again when it is needed again.

Without the system call (not Linux) nothing is given back, and nothing else changes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from functools import cache
from typing import Any

from torch import Tensor

__all__ = ["let_go", "mapped"]

_DONT_NEED = 4
# Where the storage of each living mapped tensor ends, by where it begins.
_ranges: dict[int, int] = {}


@cache
def _advise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def mapped(value: Tensor) -> Tensor:
    """Note that this tensor's storage is a file, mapped privately and never written to."""
    storage = value.untyped_storage()
    start = storage.data_ptr()
    if start and start not in _ranges:
        _ranges[start] = start + storage.nbytes()
        weakref.finalize(value, _ranges.pop, start, None)  # the storage has no Python object that lasts
    return value


def let_go(piece: Tensor) -> None:
    """Give back the pages of a piece, if they are a mapped file's."""
    if not _ranges or piece.device.type != "cpu":
        return
    end = _ranges.get(piece.untyped_storage().data_ptr())
    call = _advise()
    if end is None or call is None:
        return
    page = mmap.PAGESIZE
    begin = (
        piece.data_ptr() // page * page
    )  # the page before may be shared with the piece before: already read
    stop = min(piece.data_ptr() + piece.numel() * piece.element_size(), end) // page * page
    if stop > begin:
        call(begin, stop - begin, _DONT_NEED)
