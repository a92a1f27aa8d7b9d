"""Lossless compression of a tensor's bytes: byte planes first, then zstd.

The bytes of floating-point numbers compress badly in the order they lie in; all first bytes, then all
second bytes and so on compress well, since exponents resemble each other. Needs the extra ``compress``.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from torchtap.errors import MissingExtraError, RunCorruptError

__all__ = ["Compressor", "decompress", "make_compressor"]


class Compressor(Protocol):
    """Bytes in, fewer bytes out."""

    def __call__(self, buffer: memoryview, item_size: int) -> bytes | None:
        """The compressed bytes; ``None`` when that would not save anything worth having."""


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise MissingExtraError(
            "compress='zstd' needs the package zstandard: pip install 'torchtap[compress]'", extra="compress"
        ) from None
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


def decompress(packed: bytes, item_size: int, nbytes: int) -> memoryview:
    """The original bytes, exactly ``nbytes`` of them, or ``RunCorruptError``."""
    zstandard = _zstandard()
    try:
        # before anything is allocated, so that a lying frame cannot take more memory than the shape says
        if zstandard.frame_content_size(packed) != nbytes:
            raise RunCorruptError(f"its compressed bytes do not unpack to the {nbytes} bytes of its shape")
        planes = zstandard.ZstdDecompressor().decompress(packed, max_output_size=nbytes)
    except (zstandard.ZstdError, MemoryError) as error:
        raise RunCorruptError(f"its compressed bytes cannot be unpacked: {error}") from None
    items = np.frombuffer(planes, np.uint8).reshape(item_size, -1).T
    return np.array(items, order="C").reshape(-1).data  # a copy in any case: tensors are writable
