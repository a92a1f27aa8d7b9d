"""A checksum of a JSON text inside the text itself: of a segment's head, a manifest, an event.

The text begins with a fact ``check`` of eight hex digits. They are the crc32 of the text with eight zeros in their
stead. So a flipped bit in a name, a shape or a note is noticed as one in an array is.

`JSON_LIMIT` and `load_json` are the gate for the size of foreign JSON: parsing takes many times the text's own room, so
what it would take is estimated first.
"""

from __future__ import annotations

import json
import re

from torchtap.errors import RunCorruptError
from torchtap.store.format.checksum import checksum

__all__ = ["JSON_LIMIT", "UNSEALED", "is_sealed", "load_json", "seal"]

JSON_LIMIT = 64 << 20  # bytes of one text
UNSEALED = "00000000"
_PLACE = re.compile(  # at the beginning of an object, or of the first note of a segment's head
    rb'\{\s*(?:"__metadata__":\{"torchtap":"\{\\"format\\":\d{1,4},)?\\?"check\\?":\s?\\?"([0-9a-f]{8})\\?"'
)
_FREE = 48 << 20
_BYTES_OF_A_CONTAINER, _BYTES_OF_A_VALUE = 240, 48


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
    """``json.loads`` whose every failure on hostile text is a ``RunCorruptError``, and which takes bounded memory."""
    if len(text) > JSON_LIMIT:
        raise RunCorruptError(f"it has {len(text)} bytes of JSON; at most {JSON_LIMIT} are accepted")
    if len(text) > 1 << 16 and _room_for(text) > _FREE + 4 * len(text):
        raise RunCorruptError(f"its {len(text)} bytes of JSON would take far more memory than they should")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunCorruptError(f"not JSON: {error}") from None


def _room_for(text: str | bytes) -> int:
    """About how much memory the text's values would take, at most."""
    if isinstance(text, str):
        containers, values = text.count("{") + text.count("["), text.count(",") + text.count(":")
    else:
        containers, values = text.count(b"{") + text.count(b"["), text.count(b",") + text.count(b":")
    return _BYTES_OF_A_CONTAINER * containers + _BYTES_OF_A_VALUE * values
