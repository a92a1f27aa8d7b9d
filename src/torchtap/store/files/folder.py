"""Reading a folder on this machine without ever leaving it.

The caller's path may be anything, also a link. Below it, nothing is followed: folders and files are opened
by their own name, relative to their parent, refusing links, and only regular files are read, so that a
planted link or pipe can neither lead outside nor block. Files are read with ``pread``, never mapped: a file
that shrinks meanwhile is an error, not a crash of the process.

`Folder` is what every reader works with; `remote` has the one for object stores.
"""

from __future__ import annotations

import errno
import os
import stat
from types import TracebackType
from typing import Protocol, final

from torchtap.errors import RunCorruptError
from torchtap.store.files import system

__all__ = ["Folder", "LocalFile", "LocalFolder", "OpenFile"]


class OpenFile(Protocol):
    """A file that is open for reading at any offset."""

    size: int
    allocated: int  # bytes that are really there: fewer than ``size`` when the file has holes
    stamp: object  # another one once the file was replaced

    def read(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes, or ``RunCorruptError``."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer, or ``RunCorruptError``."""

    def __enter__(self) -> OpenFile: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Folder(Protocol):
    """A folder to read from."""

    def names(self) -> list[str]:
        """What is in it; empty when it does not exist."""

    def child(self, name: str) -> Folder:
        """A folder in it."""

    def open(self, name: str) -> OpenFile:
        """A file in it; ``OSError`` when it cannot be opened."""

    def locked(self, name: str) -> bool | None:
        """Whether a living process holds the lock file ``name``; ``None`` when nobody can tell."""


@final
class LocalFile:
    """A regular file, read by position."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
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
            count = system.read_at(self._descriptor, buffer, offset)
            if count == 0:
                raise RunCorruptError(f"the file ends before byte {offset + len(buffer)}")
            buffer, offset = buffer[count:], offset + count

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


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
