"""Lossless compression of a tensor's bytes: byte planes first, then zstd.

The bytes of floating-point numbers compress badly in the order they lie in; all first bytes, then all
second bytes and so on compress well, since exponents resemble each other. Needs the extra ``compress``.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from torchtap.errors import RunCorruptError, RunError, needing

__all__ = ["Compressor", "decompress", "make_compressor"]


_PIECE = 1 << 20
_WINDOW = 8 << 20  # what a frame may ask to be kept while it is unpacked; ours ask for half a MiB


class Compressor(Protocol):
    """Bytes in, fewer bytes out."""

    def __call__(self, buffer: memoryview, item_size: int) -> bytes | None:
        """The compressed bytes; ``None`` when that would not save anything worth having."""


def _zstandard() -> Any:
    with needing("the package zstandard", "compress", who="compress='zstd'"):
        import zstandard
    return zstandard


def make_compressor(name: str | None) -> Compressor | None:
    """The compressor called ``name``; ``None`` for none."""
    if name is None:
        return None
    if name != "zstd":
        raise ValueError(f"compress={name!r} is not known; 'zstd' and None are")
    zstd = _zstandard().ZstdCompressor(level=1, write_content_size=True)

    def compress(buffer: memoryview, item_size: int) -> bytes | None:
        planes = np.frombuffer(buffer, np.uint8).reshape(-1, item_size).T
        packed: bytes = zstd.compress(np.ascontiguousarray(planes))
        return packed if len(packed) < 0.95 * len(buffer) else None

    return compress


def decompress(packed: bytearray, item_size: int, nbytes: int) -> memoryview:
    """The original bytes, exactly ``nbytes`` of them, or ``RunCorruptError``.

    Plane after plane goes to its place as it is unpacked, so that little more than the result is in memory.
    """
    zstandard = _zstandard()
    try:
        # before anything is allocated, so that a lying frame cannot take more memory than the shape says
        if zstandard.frame_content_size(packed) != nbytes:
            raise RunCorruptError(f"its compressed bytes do not unpack to the {nbytes} bytes of its shape")
        items = np.empty((nbytes // item_size, item_size), np.uint8)
        unpacked = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(packed)
        for plane in range(item_size):
            for start in range(0, len(items), _PIECE):
                stop = min(start + _PIECE, len(items))
                piece = unpacked.read(stop - start)
                if len(piece) != stop - start:
                    raise RunCorruptError("its compressed bytes end too early")
                items[start:stop, plane] = np.frombuffer(piece, np.uint8)
    except MemoryError:
        raise RunError(f"it unpacks to {nbytes} bytes, for which there is no memory") from None
    except zstandard.ZstdError as error:
        raise RunCorruptError(f"its compressed bytes cannot be unpacked: {error}") from None
    return items.reshape(-1).data
