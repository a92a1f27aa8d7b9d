"""The note under ``torchtap`` that every segment has: which format, whose part, which flushes, which steps.

A file's name and folder say the same. Where the name differs the file was renamed, and the note, which has a checksum,
counts. Where the folder differs the file was moved there from another rank or attempt, and is not what it stands for.
"""

from __future__ import annotations

import json

from torchtap.errors import RunCorruptError
from torchtap.store.files.layout import FORMAT_VERSION, PartOf, SegmentName
from torchtap.store.format.seal import UNSEALED

__all__ = ["check_part", "named_by", "segment_note"]


def segment_note(name: SegmentName, part: PartOf, **facts: object) -> str:
    """The note of a segment of this name and part. It begins with the room for the head's checksum."""
    start = {"format": FORMAT_VERSION, "check": UNSEALED, "kind": name.kind}
    where = {"part": list(part), "flushes": [name.first, name.last], "steps": [name.low, name.high]}
    return json.dumps({**start, **where, **facts}, separators=(",", ":"))


def named_by(note: dict[str, object], file: SegmentName) -> SegmentName:
    """The name that a note gives its segment; that of the file where the note, of the first format, says nothing."""
    if note.get("format") == 1:
        return file
    match note:
        case {"flushes": [int(first), int(last)], "steps": [int(low), int(high)]}:
            if 0 <= first <= last < 10**12 and low <= high and abs(low) < 2**63 and abs(high) < 2**63:
                return SegmentName(file.kind, first, last, low, high)
    raise RunCorruptError("its note does not say which flushes and steps it holds")


def check_part(said: object, part: PartOf) -> None:
    """Raise where a file says that it is another part's; the first runs say nothing."""
    if said is not None and said != list(part):
        match said:
            case [int(rank), int(attempt)]:
                raise RunCorruptError(f"it was moved here: it is of rank {rank}, attempt {attempt}")
        raise RunCorruptError("it does not say whose part it is")
