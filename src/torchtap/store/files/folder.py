"""Folders of a run: read them without ever leaving them, and write files that are either whole or not there.

Reading: the caller's path may be a link. Below it nothing is followed: folders and files are opened by name, relative
to their parent, refusing links, and only regular files are read. A planted link or pipe can neither lead outside nor
block. Files are read with ``pread``, never mapped: a file that shrinks meanwhile is an error, not a crash.

Writing: every file grows under a temporary name and appears by being renamed, which survives the death of the process
at any moment. Only synced files survive a loss of power. Links inside a run folder are refused or replaced, never
followed. Paths are absolute from the start, so a later ``os.chdir`` has no effect.

`Folder` and `Destination` are the interfaces; `remote` has those for object stores.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, final

from torchtap.errors import RunCorruptError
from torchtap.store.files import system
from torchtap.store.files.layout import (
    LOCK,
    TEMPORARY,
    PartOf,
    attempt_folder,
    new_run_id,
    parse_attempt,
    parse_pack,
    parse_rank,
    rank_folder,
)

__all__ = [
    "Destination",
    "Folder",
    "LocalDestination",
    "LocalFile",
    "LocalFolder",
    "OpenFile",
    "anchored",
    "folder_of",
    "is_run",
    "run_inside",
]


class OpenFile(Protocol):
    """A file that is open for reading at any offset."""

    size: int
    allocated: int  # bytes on the disk: fewer than ``size`` if the file has holes
    stamp: object  # changes when the file is replaced

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes, or raise ``RunCorruptError``."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer, or raise ``RunCorruptError``."""

    def __enter__(self) -> OpenFile: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Folder(Protocol):
    """A folder to read from."""

    def names(self) -> list[str]:
        """Return the names in it; empty if it does not exist."""

    def child(self, name: str) -> Folder:
        """Return a folder in it."""

    def open(self, name: str) -> OpenFile:
        """Open a file in it. Raise ``OSError`` if that fails."""

    def locked(self, name: str) -> bool | None:
        """Return True if a living process holds the lock file ``name``; None if that is not known."""


@final
class LocalFile:
    """A regular file, read by position."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        facts = os.fstat(descriptor)
        self.size = facts.st_size
        self.allocated = system.allocated_bytes(facts)
        self.stamp: object = (facts.st_ino, facts.st_mtime_ns, facts.st_size)

    def read(self, offset: int, size: int) -> bytes:
        buffer = bytearray(size)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        while len(buffer):
            count = system.read_at(self.descriptor, buffer, offset)
            if count == 0:
                raise RunCorruptError(f"the file ends before byte {offset + len(buffer)}")
            buffer, offset = buffer[count:], offset + count

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.descriptor)


@final
class LocalFolder:
    """A folder below ``root``; ``inside`` are the names that lead to it, none of which may be a link."""

    def __init__(self, root: str, inside: tuple[str, ...] = ()) -> None:
        self._root = root
        self._inside = inside

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self._root, (*self._inside, name))

    def names(self) -> list[str]:
        try:
            return system.names_below(self._root, self._inside)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open(self, name: str) -> LocalFile:
        descriptor = system.open_below(self._root, self._inside, name)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return LocalFile(descriptor)

    def locked(self, name: str) -> bool | None:
        try:
            descriptor = system.open_below(self._root, self._inside, name)
        except OSError:
            return None
        try:
            return system.is_held(descriptor)
        finally:
            os.close(descriptor)


class Destination(Protocol):
    """The folder that one attempt of one rank is written to. ``run_id`` identifies its files."""

    part: PartOf
    run_id: str
    folder: Folder

    def put(self, name: str, buffers: Sequence[bytes | memoryview], replaces: Sequence[str] = ()) -> None:
        """Write a whole file, replacing an older one of that name; then remove the files that it replaces."""

    def sync(self, only: Sequence[str] = ("",)) -> None:
        """Return when every file that has appeared is on the disk, or those whose names begin so."""

    def release(self) -> None:
        """Release the lock: this writer is done."""


@final
class LocalDestination:
    """One attempt of one rank, in a folder that no other writer has."""

    def __init__(self, run: str, rank: int) -> None:
        parent = os.path.join(run, rank_folder(rank))
        os.makedirs(parent, exist_ok=True)
        system.refuse_link(parent)
        attempt = max(
            (found for name in os.listdir(parent) if (found := parse_attempt(name)) is not None), default=-1
        )
        while True:
            attempt += 1
            try:
                # Making a folder is atomic: of two writers exactly one gets this attempt.
                os.mkdir(os.path.join(parent, attempt_folder(attempt)))
                break
            except FileExistsError:
                continue
        self.part: PartOf = rank, attempt
        self.run_id = new_run_id()
        self.path = os.path.join(parent, attempt_folder(attempt))
        self.folder: Folder = LocalFolder(run, (rank_folder(rank), attempt_folder(attempt)))
        self._count = 0
        self._unsynced: list[str] = []
        self._rooted = False
        # Held until this process ends, however it ends: it tells a live run from an interrupted one.
        self._lock = system.open_lock(os.path.join(self.path, LOCK))
        with suppress(OSError):  # a file system without locks: readers take the run for a live one
            system.hold(self._lock)

    def put(self, name: str, buffers: Sequence[bytes | memoryview], replaces: Sequence[str] = ()) -> None:
        self._count += 1
        temporary = os.path.join(self.path, f"{TEMPORARY}{self._count}")
        try:
            descriptor = system.new_file(temporary)
            try:
                system.write_all(descriptor, buffers)
            finally:
                os.close(descriptor)
            os.replace(temporary, os.path.join(self.path, name))
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._unsynced.append(name)
        if not set(replaces) <= set(self._unsynced):
            try:
                self.sync([name])  # what was safe on the disk stays safe
            except OSError:
                return  # both stay; a reader takes the wider one
        for each in replaces:
            self.remove(each)

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if that fails."""
        self._unsynced = [each for each in self._unsynced if each != name]
        with suppress(OSError):
            os.unlink(os.path.join(self.path, name))

    def sync(self, only: Sequence[str] = ("",)) -> None:
        names = [name for name in self._unsynced if name.startswith(tuple(only))]
        if not names:
            return
        self._unsynced = [name for name in self._unsynced if not name.startswith(tuple(only))]
        try:
            for name in dict.fromkeys(names):
                system.sync(os.path.join(self.path, name))
            system.sync(self.path)
            if not self._rooted:  # the folders themselves are entries of their parents
                rank = os.path.dirname(self.path)
                for parent in (rank, os.path.dirname(rank)):
                    system.sync(parent)
                self._rooted = True
        except OSError:
            self._unsynced = names + self._unsynced
            raise

    def release(self) -> None:
        os.close(self._lock)


def anchored(path: str) -> str:
    """Return a path that a later ``os.chdir`` does not change; an address of an object store unchanged."""
    return path if "://" in path else os.path.abspath(path)


def folder_of(path: str) -> Folder:
    """Return the folder at a path on this machine or at an address in an object store."""
    if "://" in path:
        from torchtap.store.files.remote import RemoteFolder

        return RemoteFolder(path)
    return LocalFolder(anchored(path))


def is_run(path: str | os.PathLike[str]) -> bool:
    """Return True if a folder looks like a run, without reading it."""
    names = folder_of(os.fspath(path)).names()
    return any(parse_rank(name) is not None or parse_pack(name) is not None for name in names)


def run_inside(path: str, names: Sequence[str]) -> str:
    """Return a hint at a run in a folder that is none itself."""
    for name in sorted(names):
        with suppress(OSError):
            if is_run(os.path.join(path, name)):
                return f"; {name!r} in it is one"
    return ""
