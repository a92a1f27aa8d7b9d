"""Whether a ``.pt`` file is whole: the checksums that torch writes into it, and what it says twice about itself.

torch reads such a file without looking at its checksums, so a flipped bit would be a value like any other. Not a byte
is left unlooked at: data by checksum, headers against the directory, the directory's entries against each other,
padding and the end by what they have to be.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

from torchtap.errors import RunCorruptError

__all__ = ["check_archive"]

_LOCAL = struct.Struct("<4s5H3L2H")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_TAIL = _END_64.size + _LOCATOR.size + _END.size
_SPACING = 0x4246  # "FB", the field that torch fills so that data begins at a round address
_SIZES_64 = 1
_SIZES_BEHIND = 8
_VERSIONS = ((0x031E, 45), (45, 45))


def check_archive(path: Path) -> None:
    """Raise when the file is a zip archive whose bytes are not those that were written. Older files have none."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                what = archive.testzip() or _odd_entry(file, entries) or _odd_end(file, entries)
        except (
            zipfile.BadZipFile,
            OSError,
            ValueError,
            NotImplementedError,
            RuntimeError,
            struct.error,
        ) as error:
            raise RunCorruptError(f"{path} is damaged: {error}") from error
    if what:
        raise RunCorruptError(f"{path} is damaged: the checksum or header of {what} is wrong")


def _odd_entry(file: BinaryIO, entries: list[zipfile.ZipInfo]) -> str:
    """An entry whose header does not say what the directory says, or that is unlike all others."""
    settings = [
        (
            e.create_version,
            e.create_system,
            e.external_attr,
            e.internal_attr,
            e.volume,
            e.reserved,
            e.extra,
            e.comment,
        )
        for e in entries
    ]
    usual = max(sorted(set(settings)), key=settings.count, default=None)
    for entry, setting in zip(entries, settings, strict=True):
        if setting != usual or not _headers_agree(file, entry) or not _ends_as_meant(file, entry):
            return entry.filename
    return ""


def _ends_as_meant(file: BinaryIO, info: zipfile.ZipInfo) -> bool:
    """Whether an entry that says its sizes behind its data says the right ones there."""
    if not info.flag_bits & _SIZES_BEHIND:
        return True
    file.seek(info.header_offset + _LOCAL.size - 4)
    name_size, extra_size = struct.unpack("<2H", file.read(4))
    file.seek(name_size + extra_size + info.compress_size, 1)
    numbers = (b"PK\x07\x08", info.CRC, info.compress_size, info.file_size)
    behind = file.read(24)
    return any(behind.startswith(struct.pack(form, *numbers)) for form in ("<4s3L", "<4sL2Q"))


def _headers_agree(file: BinaryIO, info: zipfile.ZipInfo) -> bool:
    file.seek(info.header_offset)
    magic, version, flags, method, time, date, crc, packed, size, name_size, extra_size = _LOCAL.unpack(
        file.read(_LOCAL.size)
    )
    name, extra = file.read(name_size), file.read(extra_size)
    moment = ((date >> 9) + 1980, (date >> 5) & 15, date & 31, time >> 11, (time >> 5) & 63, (time & 31) * 2)
    here = (magic, version, flags, method, moment, name.decode("utf-8", "replace"))
    there = (b"PK\x03\x04", info.extract_version, info.flag_bits, info.compress_type, info.date_time)
    # Sizes and checksum may stand behind the data instead, or in a field of their own; then the header has none.
    sizes = (crc, packed, size) in ((info.CRC, info.compress_size, info.file_size), (0, 0, 0))
    sizes = sizes or 0xFFFFFFFF in (packed, size)
    return here == (*there, info.orig_filename) and sizes and _filled_as_meant(extra)


def _filled_as_meant(extra: bytes) -> bool:
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        if kind not in (_SPACING, _SIZES_64) or size > len(extra) - 4:
            return False
        if kind == _SPACING and extra[4 : 4 + size].strip(b"Z"):
            return False
        extra = extra[4 + size :]
    return not extra


def _odd_end(file: BinaryIO, entries: list[zipfile.ZipInfo]) -> str:
    """The end of a file as torch writes it: three records that repeat each other. Others' ends are as they are."""
    start = file.seek(0, 2) - _TAIL
    file.seek(max(0, start))
    tail = file.read()
    if b"PK\x06\x06" not in tail and b"PK\x06\x07" not in tail:
        return ""
    magic, size, made, needed, disk, first, count, total, length, offset = _END_64.unpack_from(tail)
    fine = (made, needed) in _VERSIONS and (magic, size, disk, first) == (
        b"PK\x06\x06",
        _END_64.size - 12,
        0,
        0,
    )
    fine = fine and count == total == len(entries) and offset + length == start
    fine = fine and _LOCATOR.unpack_from(tail, _END_64.size) == (b"PK\x06\x07", 0, start, 1)
    magic, disk, first, count, total, length_32, offset_32, comment = _END.unpack_from(
        tail, _END_64.size + _LOCATOR.size
    )
    fine = fine and (magic, disk, first, comment) == (b"PK\x05\x06", 0, 0, 0)
    fine = fine and {count, total} <= {len(entries), 0xFFFF}
    fine = fine and length_32 in (length, 0xFFFFFFFF) and offset_32 in (offset, 0xFFFFFFFF)
    return "" if fine else "its directory"
