"""The crc32 beside every array of a run, whole or for each stretch of it.

Large grids of numbers are checked in stretches, so that reading one series verifies what it reads and no
more.

A checksum that was taken while a tensor was copied stays with the copy (`keep_checksum`) until somebody changes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, final

from torchtap.errors import RunCorruptError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CHUNK",
    "ChunkedChecksum",
    "checksum",
    "checksums",
    "copy_bytes",
    "keep_checksum",
    "kept_checksum",
    "parse_checksums",
    "verify",
]

CHUNK = 64 << 10

checksum: Callable[..., int]  # (bytes, value so far = 0)
copy_bytes: Callable[[int, int, int], int] | None  # (to, from, how many): their checksum
try:
    from torchtap.store.format._checksum import copy as copy_bytes
    from torchtap.store.format._checksum import crc32 as checksum
except ImportError:  # not built, or a processor without the instruction: the same numbers, more slowly
    checksum = zlib.crc32
    copy_bytes = None


def checksums(buffer: memoryview, chunk: int = CHUNK) -> list[str]:
    """One checksum for each ``chunk`` bytes, as eight hex digits."""
    return [f"{checksum(buffer[start : start + chunk]):08x}" for start in range(0, len(buffer), chunk)]


@cache
def _kept() -> MutableMapping[Tensor, tuple[int, int]]:
    """The checksums that are known, each with the version that it is of: beside the tensors, which users get."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def keep_checksum(value: Tensor, crc: int) -> None:
    """Note that the checksum of a tensor's memory, as it is now, is known."""
    from torchtap._torch import version_of

    if not value.is_inference():  # where changes are not counted
        _kept()[value] = crc, version_of(value)


def kept_checksum(value: Tensor) -> int | None:
    """The checksum that was noted with a tensor, if nobody has changed it since."""
    from torchtap._torch import version_of

    crc, version = _kept().get(value, (None, None))
    return crc if crc is not None and version == version_of(value) else None


def parse_checksums(facts: dict[str, object], nbytes: int) -> tuple[int, list[str]]:
    """The stretch and the checksums noted for an array of ``nbytes``, or all of it and its one checksum."""
    match facts.get("crc32"):
        case str(single):
            return max(nbytes, 1), [single]
        case list(several):
            chunk = facts.get("chunk")
            if type(chunk) is int and chunk > 0 and len(several) == -(-nbytes // chunk):
                return chunk, [str(one) for one in several]
    raise RunCorruptError("its checksums are missing or too few")


def verify(buffer: memoryview, expected: str) -> None:
    """Raise ``RunCorruptError`` unless the bytes are those that were written."""
    if f"{checksum(buffer):08x}" != expected:
        raise RunCorruptError("its bytes are not those that were written (the checksum differs)")


@final
class ChunkedChecksum:
    """The same checksums as `checksums`, of bytes that come piece by piece."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._filled = 0
        self._current = 0
        self._done: list[str] = []

    def update(self, piece: memoryview) -> None:
        while len(piece):
            part = piece[: self._chunk - self._filled]
            self._current = checksum(part, self._current)
            self._filled += len(part)
            piece = piece[len(part) :]
            if self._filled == self._chunk:
                self._finish()

    def _finish(self) -> None:
        self._done.append(f"{self._current:08x}")
        self._filled = self._current = 0

    def result(self) -> list[str]:
        """The checksums; nothing may be added after this."""
        if self._filled:
            self._finish()
        return self._done
