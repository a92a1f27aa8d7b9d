"""A checksum of a JSON text inside the text itself: of a segment's head, a manifest, an event.

The text begins with a fact ``check`` of eight hex digits. They are the crc32 of the text with eight zeros in their
stead. So a flipped bit in a name, a shape or a note is noticed as one in an array is.
"""

from __future__ import annotations

import re

from torchtap.errors import RunCorruptError
from torchtap.sanitize import JSON_LIMIT, parse_json
from torchtap.store.format.checksum import checksum

__all__ = ["JSON_LIMIT", "UNSEALED", "is_sealed", "load_json", "seal"]

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
    """Return the value of a JSON text of a run; whatever is wrong with it is a ``RunCorruptError``."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise RunCorruptError(str(error)) from None
