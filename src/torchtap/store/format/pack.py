"""Packs: one file that the processes of a node append to, with the files of all their ranks.

    <run>/ranks-00000-00007-1a2b3c4d.pack      ranks 0 to 7 of one launch

A pack is a sequence of frames, each a multiple of 8 bytes: a head, the path of a file in the run, the file's bytes. A
process reserves room for a frame under a lock, writes the bytes, and then sets the frame's state from "begun" to
"whole". A process that is killed leaves a frame that is never whole, and the frames of the others as they are. A file
that is replaced is marked "removed", and its room is given back to the disk. A path that occurs again replaces the
earlier file.

A process that closes its recording appends an index of all whole frames, which ends in its own offset. If it is the
last thing in the file, a reader needs two reads to know every file. Otherwise it walks along the heads; where a head
is damaged, it searches for the next one.

A rank whose folder exists beside the packs is read from both: attempts have different numbers.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any, final

from torchtap.errors import RunCorruptError
from torchtap.store.files import system
from torchtap.store.files.folder import Folder, LocalFolder, OpenFile, folder_of
from torchtap.store.files.layout import (
    LOCK,
    PartOf,
    attempt_folder,
    new_run_id,
    pack_name,
    parse_attempt,
    parse_pack,
    parse_rank,
    rank_folder,
)
from torchtap.store.format.checksum import JSON_LIMIT, UNSEALED, checksum, is_sealed, load_json, seal

__all__ = ["PackDestination", "PackWriter", "PackedRoot", "copy_ranks", "run_folder"]

_HEAD = struct.Struct("<4sB3xIIQ")  # magic, state, checksum, length of the path, size of the file
_REST = struct.Struct("<IQ")  # of the head: what the checksum is of, with the path
_END = struct.Struct("<Q8s")  # the last bytes of an index: its own offset
_MAGIC, _END_MAGIC = b"TTPK", b"TTPKEND\0"
_BEGUN, _WHOLE, _REMOVED = 0, 1, 2
_INDEX = "index.json"
_LONGEST_PATH = 4096
_MOST_RANKS = 1 << 16  # of one pack
_SEARCHED = 1 << 20  # bytes at a time, for the next head
_PUNCH = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def run_folder(path: str) -> Folder:
    """Return the folder of a run, packed or not."""
    root = folder_of(path)
    return PackedRoot(root) if any(parse_pack(name) for name in root.names()) else root


# --- writing --------------------------------------------------------------------------------------------------


@cache
def _fallocate() -> Any:
    """Return the system's call that gives room in a file back; None if there is none."""
    with suppress(OSError, AttributeError, TypeError):
        found = ctypes.CDLL(None).fallocate
        found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        return found
    return None


@final
class PackWriter:
    """Append files to a pack. Other processes may append to it at the same time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = system.open_lock(path)

    def append(self, path: str, buffers: Sequence[bytes | memoryview], *, at_end: bool = False) -> int:
        """Append a file. Return the offset of its frame. ``at_end`` lets the file end with that offset (`_END`)."""
        name, size = path.encode(), sum(map(len, buffers))
        crc = checksum(_REST.pack(len(name), size) + name)
        length = _HEAD.size + len(name) + size
        with system.locked_for_a_moment(self._descriptor):
            start = os.fstat(self._descriptor).st_size
            start += -start % 8
            os.ftruncate(self._descriptor, start + length + -length % 8)
            os.pwrite(self._descriptor, _HEAD.pack(_MAGIC, _BEGUN, crc, len(name), size) + name, start)
        offset = start + _HEAD.size + len(name)
        if at_end:
            buffers = [*buffers[:-1], _END.pack(start, _END_MAGIC)]
        system.write_all_at(self._descriptor, buffers, offset)
        self._set(start, _WHOLE)
        return start

    def _set(self, start: int, state: int) -> None:
        os.pwrite(self._descriptor, bytes([state]), start + 4)

    def remove(self, start: int, path: str, size: int) -> None:
        """Mark a frame as removed and give its room back to the disk."""
        self._set(start, _REMOVED)
        if (fallocate := _fallocate()) is not None:
            fallocate(self._descriptor, _PUNCH, start + _HEAD.size + len(path.encode()), size)

    def hold(self, number: int) -> None:
        """Show that the process which records a rank is alive, until it ends."""
        system.hold_number(self._descriptor, number)

    def close(self) -> None:
        """Append an index of all whole files."""
        folder = LocalFolder(os.path.dirname(self._path))
        pack = Pack(folder, os.path.basename(self._path))
        facts = {"check": UNSEALED, "files": pack.files(), "begun": pack.begun}
        text = seal(json.dumps(facts, separators=(",", ":")).encode())
        padding = -(_HEAD.size + len(_INDEX) + len(text) + _END.size) % 8
        self.append(_INDEX, [text + b" " * padding, b" " * _END.size], at_end=True)
        os.close(self._descriptor)

    def sync(self) -> None:
        """Return when everything that was appended is on the disk."""
        os.fsync(self._descriptor)


def copy_ranks(root: Folder, ranks: Sequence[int], target: str | os.PathLike[str]) -> None:
    """Copy the files of successive ranks of a run into one pack."""
    pack = PackWriter(os.path.join(target, pack_name(ranks[0], ranks[-1], "0" * 8)))
    for rank in ranks:
        folder = root.child(rank_folder(rank))
        for attempt in folder.names():
            inside = folder.child(attempt)
            for name in sorted(set(inside.names()) - {LOCK}):
                with inside.open(name) as file:
                    pack.append(f"{rank_folder(rank)}/{attempt}/{name}", [file.read(0, file.size)])
    pack.close()


@final
class PackDestination:
    """One attempt of one rank, inside the pack of its node."""

    def __init__(self, run: str, rank: int, ranks: tuple[int, int], launch: str) -> None:
        os.makedirs(run, exist_ok=True)
        root = PackedRoot(LocalFolder(run))
        names = root.child(rank_folder(rank)).names()
        attempt = max((found for name in names if (found := parse_attempt(name)) is not None), default=-1) + 1
        self.part: PartOf = rank, attempt
        self.run_id = new_run_id()
        self._inside = f"{rank_folder(rank)}/{attempt_folder(attempt)}/"
        self.path = os.path.join(run, pack_name(*ranks, launch))
        self._pack = PackWriter(self.path)
        self._pack.hold(rank)
        self._frames: dict[str, tuple[int, int]] = {}
        fresh = PackedRoot(LocalFolder(run))  # the pack may be new
        self.folder: Folder = fresh.child(rank_folder(rank)).child(attempt_folder(attempt))

    def put(self, name: str, buffers: Sequence[bytes | memoryview], replaces: Sequence[str] = ()) -> None:
        before = self._frames.get(name)
        start = self._pack.append(self._inside + name, buffers)
        self._frames[name] = start, sum(map(len, buffers))
        if before is not None:
            self._pack.remove(before[0], self._inside + name, before[1])
        for each in replaces:
            self.remove(each)

    def remove(self, name: str) -> None:
        """Remove a file."""
        if (frame := self._frames.pop(name, None)) is not None:
            self._pack.remove(frame[0], self._inside + name, frame[1])

    def sync(self, only: Sequence[str] = ("",)) -> None:
        self._pack.sync()

    def release(self) -> None:
        self._pack.close()


# --- reading --------------------------------------------------------------------------------------------------


@final
class Pack:
    """One pack file. It is walked along when one of its ranks is needed, and only what is new the next time."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._files: dict[str, tuple[int, int, int]] = {}  # by path: offset of the frame, of the bytes, size
        self._end = 0
        self.begun: list[int] = []  # offsets of frames that were not whole yet
        self._remote: OpenFile | None = None  # an object needs no handle, so it is looked up once

    def open(self) -> OpenFile:
        if self._remote is not None:
            return self._remote
        opened = self._folder.open(self._name)
        if getattr(opened, "reusable", False):
            self._remote = opened
        return opened

    def files(self) -> dict[str, tuple[int, int, int]]:
        """Return the frame's offset, the offset of the bytes and the size of each file."""
        with self.open() as file:
            if file.size > self._end:
                self._look(file)
            elif self.begun:
                self._walk(file, self.begun)
        return self._files

    def find(self, path: str) -> tuple[int, int, int]:
        found = self._files.get(path)
        if found is None:
            raise FileNotFoundError(f"{path} is not in the pack")
        return found

    def drop(self, path: str) -> None:
        """Forget a file that was removed."""
        self._files.pop(path, None)

    def locked(self, rank: int) -> bool | None:
        """Return True if the process that records a rank is alive; None if that is not known."""
        with self.open() as file:
            descriptor = getattr(file, "descriptor", None)
            return None if descriptor is None else system.number_is_held(descriptor, rank)

    def _look(self, file: OpenFile) -> None:
        if not self._end and (listed := _read_index(file)) is not None:
            (self._files, self.begun), self._end = listed, file.size
        self._walk(file, self.begun)
        while self._end + _HEAD.size <= file.size:
            following = self._frame(file, self._end)
            if following is None:
                following = _next_head(file, self._end + 8)
            self._end = min(following, file.size)

    def _walk(self, file: OpenFile, starts: list[int]) -> None:
        self.begun = []
        for start in starts:
            self._frame(file, start)

    def _frame(self, file: OpenFile, start: int) -> int | None:
        """Note the file of a frame. Return the offset of the next frame; None if there is no head here."""
        head = file.read(start, _HEAD.size)
        magic, state, crc, length, size = _HEAD.unpack(head)
        offset = start + _HEAD.size + length
        if magic != _MAGIC or length > _LONGEST_PATH or offset + size > file.size:
            return None
        name = file.read(start + _HEAD.size, length)
        if checksum(_REST.pack(length, size) + name) != crc:
            return None
        path = name.decode(errors="replace")
        if state == _BEGUN:
            self.begun.append(start)
        elif state == _WHOLE and path != _INDEX:
            self._files[path] = start, offset, size
        return int(offset + size + -(offset + size) % 8)


def _next_head(file: OpenFile, start: int) -> int:
    """Return where the next head may be: a killed process may have reserved room and not written its head."""
    while start < file.size:
        block = file.read(start, min(_SEARCHED, file.size - start))
        at = block.find(_MAGIC)
        while at >= 0 and (start + at) % 8:
            at = block.find(_MAGIC, at + 1)
        if at >= 0:
            return start + at
        start += len(block) - (len(block) % 8 if start + len(block) < file.size else 0)
    return file.size


def _read_index(file: OpenFile) -> tuple[dict[str, tuple[int, int, int]], list[int]] | None:
    """Return the files and the begun frames in the index at the end of a pack; None if there is no sound one."""
    with suppress(RunCorruptError, UnicodeDecodeError, struct.error):
        start, magic = _END.unpack(file.read(file.size - _END.size, _END.size))
        first = start + _HEAD.size + len(_INDEX)
        length = file.size - _END.size - first
        if magic == _END_MAGIC and start >= 0 and 0 < length <= JSON_LIMIT:
            text = file.read(first, length).rstrip(b" ")
            found = load_json(text) if is_sealed(text) else None
            match found:
                case {"files": dict(listed), "begun": list(begun)} if all(
                    type(each) is int for each in begun
                ):
                    return dict(_places(listed, file.size)), [each for each in begun if 0 <= each < start]
    return None


def _places(listed: dict[str, object], size: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for path, place in listed.items():
        match place:
            case [int(frame), int(start), int(length)] if (
                0 <= frame < start and length >= 0 and start + length <= size
            ):
                yield path, (frame, start, length)
            case _:
                raise RunCorruptError(f"the index places {path[:80]!r} outside of the pack")


@final
class _Window:
    """A file inside a pack."""

    def __init__(self, pack: Pack, path: str) -> None:
        self._pack = pack
        self._path = path
        self._frame, self._start, self.size = pack.find(path)
        self._file = pack.open()
        self._checked = getattr(self._file, "reusable", False)  # nothing is removed from an object
        self.allocated = self.size
        self.stamp: object = (self._frame, self._start)

    def read(self, offset: int, size: int) -> bytes:
        buffer = bytearray(size)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) > self.size:
            raise RunCorruptError(f"the file ends before byte {offset + len(buffer)}")
        self._file.read_into(self._start + offset, buffer)
        if not self._checked and self._file.read(self._frame + 4, 1) == bytes([_REMOVED]):
            self._pack.drop(self._path)
            raise FileNotFoundError(f"{self._path} was replaced")

    def __enter__(self) -> _Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)


@final
class _PackedFolder:
    """A folder of one rank: inside packs, one for each launch, and perhaps beside them."""

    def __init__(self, packs: Sequence[Pack], path: str, beside: Folder) -> None:
        self._packs = packs
        self._path = path
        self._beside = beside

    def child(self, name: str) -> _PackedFolder:
        return _PackedFolder(self._packs, f"{self._path}{name}/", self._beside.child(name))

    def names(self) -> list[str]:
        found = set(self._beside.names())
        for pack in self._packs:
            inside = (path[len(self._path) :] for path in pack.files() if path.startswith(self._path))
            found.update(path.split("/", 1)[0] for path in inside)
        return sorted(found)

    def open(self, name: str) -> OpenFile:
        for pack in self._packs:
            with suppress(FileNotFoundError):
                return _Window(pack, f"{self._path}{name}")
        return self._beside.open(name)

    def locked(self, name: str) -> bool | None:
        rank = parse_rank(self._path.split("/", 1)[0])
        own = [pack for pack in self._packs if any(path.startswith(self._path) for path in pack.files())]
        if name != LOCK or not own or rank is None:
            return self._beside.locked(name)
        return own[-1].locked(rank)


@final
class PackedRoot:
    """A run folder with packs in it."""

    def __init__(self, inner: Folder) -> None:
        self._inner = inner
        self._packs: dict[str, Pack] = {}
        self._ranks: dict[str, list[Pack]] = {}
        self.names()

    def names(self) -> list[str]:
        found = self._inner.names()
        self._packs = {
            name: self._packs.get(name) or Pack(self._inner, name) for name in found if parse_pack(name)
        }
        self._ranks = {}
        for name, pack in sorted(self._packs.items()):
            first, last = parse_pack(name) or (0, -1)
            for rank in range(first, min(last, first + _MOST_RANKS) + 1):
                self._ranks.setdefault(rank_folder(rank), []).append(pack)
        return [*found, *(rank for rank in self._ranks if rank not in found)]

    def child(self, name: str) -> Folder:
        packs = self._ranks.get(name)
        beside = self._inner.child(name)
        return beside if packs is None else _PackedFolder(packs, f"{name}/", beside)

    def open(self, name: str) -> OpenFile:
        return self._inner.open(name)

    def locked(self, name: str) -> bool | None:
        return self._inner.locked(name)
