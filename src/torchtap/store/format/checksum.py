"""The crc32 beside every array of a run, whole or for each stretch of it.

Large grids of numbers are checked in stretches, so that reading one series verifies what it reads and no
more.

A checksum that was taken while a tensor was copied stays with the copy (`keep_checksum`) until somebody changes it.

A checksum of a JSON text inside the text itself: of a segment's head, a manifest, an event.

The text begins with a fact ``check`` of eight hex digits. They are the crc32 of the text with eight zeros in their
stead. So a flipped bit in a name, a shape or a note is noticed as one in an array is.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import TYPE_CHECKING

from torchtap.errors import RunCorruptError
from torchtap.sanitize import JSON_LIMIT, parse_json

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CHUNK",
    "JSON_LIMIT",
    "UNSEALED",
    "checksum",
    "checksums",
    "copy_bytes",
    "is_sealed",
    "keep_checksum",
    "kept_checksum",
    "load_json",
    "parse_checksums",
    "seal",
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


UNSEALED = "00000000"
_PLACE = re.compile(  # at the beginning of an object, or of the first note of a segment's head
    rb'\{\s*(?:"__metadata__":\{"torchtap":"\{\\"format\\":\d{1,4},)?\\?"check\\?":\s?\\?"([0-9a-f]{8})\\?"'
)


def seal(text: bytes) -> bytes:
    """The text with its checksum filled in; the text must begin with a ``check`` of zeros."""
    found = _PLACE.match(text)
    if found is None or found[1] != UNSEALED.encode():
        raise ValueError("the text has no room for its checksum")
    return b"".join((text[: found.start(1)], f"{checksum(text):08x}".encode(), text[found.end(1) :]))


def is_sealed(text: bytes) -> bool:
    """Whether the text has a checksum, and it is right; ``RunCorruptError`` when it is wrong."""
    found = _PLACE.match(text)
    if found is None:
        return False
    view = memoryview(text)
    crc = checksum(view[: found.start(1)])
    crc = checksum(view[found.end(1) :], checksum(UNSEALED.encode(), crc))
    if f"{crc:08x}".encode() != found[1]:
        raise RunCorruptError("it is not the text that was written (the checksum differs)")
    return True


def load_json(text: str | bytes) -> object:
    """Return the value of a JSON text of a run. Raise ``RunCorruptError`` for anything that is wrong with it."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise RunCorruptError(str(error)) from None
