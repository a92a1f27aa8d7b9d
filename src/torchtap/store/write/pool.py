"""Host memory that is used again: a copy of a tensor costs less than a memcpy, and no fresh pages.

A copy into newly allocated memory pays for every page that it touches first, several times the price of the
copy itself. `HostPool.copy` copies into memory that was used before. A buffer comes back by itself when the
last tensor that looks at it is gone, whoever held it: the writer after writing, a sink, a user. So it is
always safe to keep a copy; it only means that the pool has less to give, and past its bound it makes
ordinary copies.

Copies go past the processor's cache where they can (``_checksum.c``): what the model needs next is still in it
afterwards. Their checksum is taken on the way, which costs nothing, so that the writer's thread only has to write.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from torchtap.errors import ReductionError
from torchtap.reduce.densify import PLAIN_TYPES, has_memory, located
from torchtap.reduce.kernel import SMALL, is_sound
from torchtap.store.format import checksum

__all__ = ["HostPool", "pool_of"]

_SLAB = 16 << 20
_AT_ONCE = 16
_ALIGNMENT = 64


@final
class HostPool:
    """Pooled copies of tensors on the host, within ``limit`` bytes. Safe to use from several threads.

    The bound should be above the writer's ``queue_bytes``, or the pool is empty just when the disk is slow.
    """

    def __init__(self, limit: int = 384 << 20) -> None:
        self._limit = limit
        self._made = 0  # bytes of all buffers, free or lent
        self._free: dict[int, deque[npt.NDArray[np.uint8]]] = {}
        self._lent: dict[int, weakref.ref[object]] = {}

    @property
    def nbytes(self) -> int:
        """How much memory the pool holds, free or lent."""
        return self._made

    def copy(self, value: Tensor) -> Tensor:
        """A contiguous copy on the host, without gradient history."""
        if value.requires_grad:
            value = value.detach()
        sound = is_sound(value)
        if sound and value.nbytes < SMALL:
            return value.clone(memory_format=torch.contiguous_format)
        if not sound:
            _check_memory(value)
        buffer = self.lend(value.nbytes) if sound or _is_large_and_strided(value) else None
        if buffer is None:
            return _plain_copy(value)
        lease = buffer[: value.nbytes]
        key = id(lease)

        # Runs when the last tensor over the lease is gone, in whatever thread that happens: only atomic operations.
        def come_back(reference: weakref.ref[object]) -> None:
            self._lent.pop(key, None)
            self.give_back(buffer)

        self._lent[key] = weakref.ref(lease, come_back)
        copied = torch.frombuffer(lease, dtype=value.dtype).view(value.shape)
        _copy_into(copied, value)
        return copied

    def lend(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Memory for so many bytes, to be given back; None past the bound."""
        return self._take(_room(nbytes))

    def give_back(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Nobody looks at what was lent any more. Any thread may say so, at any moment."""
        self._free.setdefault(buffer.nbytes, deque()).append(buffer)

    def _take(self, room: int) -> npt.NDArray[np.uint8] | None:
        free = self._free.get(room)
        if free:
            try:
                return free.pop()  # the one that came back last is the likeliest to be in cache
            except IndexError:  # another thread was faster
                pass
        while self._made + room > self._limit:
            if not self._shrink(room):
                return None
        # Several buffers from one large piece of memory, which the system can back with large pages.
        count = max(1, min(_SLAB // room, _AT_ONCE, (self._limit - self._made) // room))
        slab = _aligned(count * room)
        self._made += slab.nbytes
        buffers = [slab[start : start + room] for start in range(0, slab.nbytes, room)]
        self._free.setdefault(room, deque()).extend(buffers[1:])
        return buffers[0]

    def _shrink(self, wanted: int) -> bool:
        """Let go of the free buffers of another size; False when there are none."""
        for room in list(self._free):
            if room != wanted and (free := self._free.pop(room, None)):
                self._made -= room * len(free)
                return True
        return False


_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, HostPool] = weakref.WeakKeyDictionary()


def pool_of(model: nn.Module) -> HostPool:
    """The pool for looking inside this model: the second look uses the memory of the first. It goes with the model."""
    pool = _OF_MODELS.get(model)
    if pool is None:
        pool = _OF_MODELS[model] = HostPool()
    return pool


def _room(nbytes: int) -> int:
    """The size of the buffer for so many bytes: at most an eighth more, so that nearby sizes share buffers."""
    grain = 1 << max(12, nbytes.bit_length() - 4)
    return -(-nbytes // grain) * grain


def _aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that begins where torch's own does: what is computed from it may depend on that in its last digits."""
    whole = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + nbytes]


def _check_memory(value: Tensor) -> None:
    if type(value) in PLAIN_TYPES and value.numel() and not has_memory(value):
        raise ReductionError(
            f"a tensor of shape {tuple(value.shape)} cannot be copied: its storage was freed or made too small"
        )


def _is_large_and_strided(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized and value.nbytes >= SMALL


def _copy_into(copied: Tensor, value: Tensor) -> None:
    """Past the cache and with a checksum, where the value lies in one piece on the host."""
    place = located(value) if checksum.copy_bytes is not None and value.is_contiguous() else None
    if checksum.copy_bytes is None or place is None:
        copied.copy_(value)
        return
    address, storage = place  # held while the interpreter is let go
    checksum.keep_checksum(copied, checksum.copy_bytes(copied.data_ptr(), address, value.nbytes))
    del storage


def _plain_copy(value: Tensor) -> Tensor:
    if value.layout is not torch.strided or value.is_quantized:
        return value.cpu().clone() if value.device.type == "cpu" else value.cpu()
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)
