"""The note under ``torchtap`` that every segment has: which format, which flushes, which steps.

A file's name says the same. Where they differ the file was renamed, and the note, which has a checksum, counts.
"""

from __future__ import annotations

import json
from typing import Any

from torchtap.errors import RunCorruptError
from torchtap.store.files.layout import FORMAT_VERSION, SegmentName
from torchtap.store.format.seal import UNSEALED

__all__ = ["named_by", "segment_note"]


def segment_note(name: SegmentName, **facts: Any) -> str:
    """The note of a segment of this name. It begins with the room for the head's checksum."""
    start = {"format": FORMAT_VERSION, "check": UNSEALED, "kind": name.kind}
    where = {"flushes": [name.first, name.last], "steps": [name.low, name.high]}
    return json.dumps({**start, **where, **facts}, separators=(",", ":"))


def named_by(note: dict[str, Any], file: SegmentName) -> SegmentName:
    """The name that a note gives its segment; that of the file where the note, of the first format, says nothing."""
    if note.get("format") == 1:
        return file
    match note:
        case {"flushes": [int(first), int(last)], "steps": [int(low), int(high)]}:
            if 0 <= first <= last < 10**12 and low <= high and abs(low) < 2**63 and abs(high) < 2**63:
                return SegmentName(file.kind, first, last, low, high)
    raise RunCorruptError("its note does not say which flushes and steps it holds")
