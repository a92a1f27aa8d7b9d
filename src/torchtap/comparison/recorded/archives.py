"""``.pt`` files as zip archives: whether one is whole, and its entries' bytes, verified as they are read.

torch reads such a file without looking at its checksums, so a flipped bit would be a value like any other. Not a byte
is left unlooked at: data by checksum, headers against the directory, the directory's entries against each other,
padding and the end by what they have to be. No torch is needed.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import final

from torchtap.errors import RunCorruptError
from torchtap.store.format.checksum import checksum

__all__ = ["Archive", "check_archive", "is_archive"]

_LOCAL = struct.Struct("<4s5H3L2H")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_TAIL = _END_64.size + _LOCATOR.size + _END.size
_SPACING = 0x4246  # "FB", the field that torch fills so that data begins at a round address
_SIZES_64 = 1
_SIZES_BEHIND = 8
_VERSIONS = ((0x031E, 45), (45, 45))


def is_archive(path: Path) -> bool:
    """Whether a file is a zip archive; torch's older files are none."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def check_archive(path: Path) -> None:
    """Raise when the file is a zip archive whose bytes are not those that were written. Older files have none."""
    if not is_archive(path):
        return
    archive = Archive(path)
    for name in archive.names:
        for _ in archive.pieces(name, 1 << 20):
            pass


@final
class Archive:
    """An archive whose headers and directory were checked; data is checked when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file, zipfile.ZipFile(file) as archive:
            self._entries = {info.filename: info for info in archive.infolist()}
            what = _odd_entry(file, archive.infolist()) or _odd_end(file, archive.infolist())
            if what or len(self._entries) != len(archive.infolist()):
                raise RunCorruptError(f"{path} is damaged: the header of {what or 'an entry'} is wrong")

    @property
    def names(self) -> tuple[str, ...]:
        """Its entries, in order."""
        return tuple(self._entries)

    def size(self, name: str) -> int:
        """The bytes of an entry."""
        return self._entries[name].file_size

    def read(self, name: str) -> bytes:
        """All bytes of an entry, verified."""
        return b"".join(bytes(piece) for piece in self.pieces(name, 1 << 20))

    def pieces(self, name: str, size: int) -> Iterator[memoryview]:
        """The bytes of an entry in order, ``size`` at a time; the end raises when they were damaged.

        A piece is overwritten by the next but one.
        """
        info = self._entries[name]
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise RunCorruptError(f"{self.path} is damaged: {name} is compressed, as torch never does it")
        buffers = [memoryview(bytearray(max(1, min(size, info.file_size)))) for _ in range(2)]
        left, crc = info.file_size, 0
        with self._open() as file:
            file.seek(_data_start(file, info))
            while left:
                buffers.reverse()
                buffer = buffers[0]
                read = file.readinto(buffer[: min(left, len(buffer))])
                if not read:
                    raise RunCorruptError(f"{self.path} is damaged: {name} ends too early")
                crc = checksum(buffer[:read], crc)
                left -= read
                yield buffer[:read]
        if crc != info.CRC:
            raise RunCorruptError(f"{self.path} is damaged: the checksum of {name} is wrong")

    @contextmanager
    def _open(self) -> Iterator[FileIO]:
        try:
            with self.path.open("rb", buffering=0) as file:
                yield file
        except FileNotFoundError:
            raise
        except (
            zipfile.BadZipFile,
            OSError,
            ValueError,
            NotImplementedError,
            RuntimeError,
            struct.error,
        ) as error:
            if isinstance(error, RunCorruptError):
                raise
            raise RunCorruptError(f"{self.path} is damaged: {error}") from error


def _data_start(file: FileIO, info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset + _LOCAL.size - 4)
    name_size, extra_size = struct.unpack("<2H", file.read(4))
    return int(info.header_offset + _LOCAL.size + name_size + extra_size)


def _odd_entry(file: FileIO, entries: list[zipfile.ZipInfo]) -> str:
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


def _ends_as_meant(file: FileIO, info: zipfile.ZipInfo) -> bool:
    """Whether an entry that says its sizes behind its data says the right ones there."""
    if not info.flag_bits & _SIZES_BEHIND:
        return True
    file.seek(_data_start(file, info) + info.compress_size)
    numbers = (b"PK\x07\x08", info.CRC, info.compress_size, info.file_size)
    behind = file.read(24)
    return any(behind.startswith(struct.pack(form, *numbers)) for form in ("<4s3L", "<4sL2Q"))


def _headers_agree(file: FileIO, info: zipfile.ZipInfo) -> bool:
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


def _odd_end(file: FileIO, entries: list[zipfile.ZipInfo]) -> str:
    """The end of a file as torch writes it: three records that repeat each other. Others' ends are as they are."""
    start = file.seek(0, 2) - _TAIL
    file.seek(max(0, start))
    tail = file.read()
    if b"PK" not in tail and b"PK" not in tail:
        return ""
    magic, size, made, needed, disk, first, count, total, length, offset = _END_64.unpack_from(tail)
    locator = _LOCATOR.unpack_from(tail, _END_64.size)
    magic_32, disk_32, first_32, count_32, total_32, length_32, offset_32, comment = _END.unpack_from(
        tail, _END_64.size + _LOCATOR.size
    )
    fine = (
        (made, needed) in _VERSIONS,
        (magic, size, disk, first) == (b"PK", _END_64.size - 12, 0, 0),
        count == total == len(entries),
        offset + length == start,
        locator == (b"PK", 0, start, 1),
        (magic_32, disk_32, first_32, comment) == (b"PK", 0, 0, 0),
        {count_32, total_32} <= {len(entries), 0xFFFF},
        length_32 in (length, 0xFFFFFFFF),
        offset_32 in (offset, 0xFFFFFFFF),
    )
    return "" if all(fine) else "its directory"
