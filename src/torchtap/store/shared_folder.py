"""A folder of immutable files, on this machine or in an object store, that several processes write and read.

For outer packages that store files of their own with the crash safety of runs:
- a file appears whole, or not at all; on a local disk its bytes are synced before it appears;
- below the folder no link is followed, and only regular files are read;
- the lock of a local folder is released when its process ends, however it ends.

Not here: the layout of runs (`layout`), their writer and reader.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, final

from torchtap.errors import OutputError
from torchtap.store.files import system
from torchtap.store.files.folder import Folder, OpenFile, anchored, folder_of
from torchtap.store.format.checksum import checksum

__all__ = ["SharedFolder"]

_PARTIAL = ".partial-"
_LOCK = ".lock"
_NOT_LOCKED = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


@final
class SharedFolder:
    """Files by name in one folder, given by its path or its address (``s3://…``, ``memory://…``)."""

    checksum = staticmethod(checksum)  # crc32 of bytes, continued from a second argument

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = anchored(os.fspath(path))
        self.remote = "://" in self.path
        self._folder: Folder = folder_of(self.path)
        self._lock = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedFolder, (self.path,)

    def make(self) -> None:
        """Create the folder if it is missing."""
        if not self.remote:
            try:
                os.makedirs(self.path, exist_ok=True)
            except OSError as error:
                raise OutputError(f"{self.path} cannot be made: {error.strerror or error}") from error

    def names(self) -> list[str]:
        """Return the names of the finished files, sorted; empty if the folder does not exist."""
        return sorted(name for name in self._folder.names() if not name.startswith("."))

    def open(self, name: str) -> OpenFile:
        """Open a file for reading at any offset."""
        return self._folder.open(name)

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a file of at most ``most`` bytes."""
        with self.open(name) as file:
            if file.size > most:
                raise OSError(errno.EFBIG, f"it has more than {most} bytes", name)
            return file.read(0, file.size)

    def put(self, name: str, buffers: Iterable[bytes | memoryview]) -> int:
        """Write a file that appears whole, in place of one of that name, and return its size.

        A buffer is written before the next one is taken. Raise ``OutputError`` if writing fails.
        """
        try:
            return (self._upload if self.remote else self._write)(name, buffers)
        except OSError as error:
            raise OutputError(
                f"{name} could not be written to {self.path}: {error.strerror or error}. The files before it are safe; "
                "start again to go on"
            ) from error

    def _write(self, name: str, buffers: Iterable[bytes | memoryview]) -> int:
        partial = os.path.join(self.path, f"{_PARTIAL}{secrets.token_hex(8)}")
        try:
            descriptor = system.new_file(partial)
            try:
                size = 0
                for buffer in buffers:
                    system.write_all(descriptor, [buffer])
                    size += len(buffer)
                os.fsync(descriptor)  # before the name: a loss of power must not leave a name without bytes
            finally:
                os.close(descriptor)
            os.replace(partial, os.path.join(self.path, name))
            return size
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise

    def _upload(self, name: str, buffers: Iterable[bytes | memoryview]) -> int:
        import fsspec

        store, path = fsspec.core.url_to_fs(self.path)
        whole = bytearray()
        for buffer in buffers:
            whole += buffer
        try:
            store.pipe_file(f"{path.rstrip('/')}/{name}", bytes(whole))
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        return len(whole)

    def sync(self) -> None:
        """Return when the names of all finished files are on the disk."""
        if not self.remote:
            system.sync(self.path)

    def lock(self) -> None:
        """Become the only writer of a local folder and remove what a killed one left unfinished.

        Raise ``OutputError`` if another process is the writer. Object stores have no locks.
        """
        if self.remote:
            return
        self._lock = system.open_lock(os.path.join(self.path, _LOCK))
        try:
            system.hold(self._lock)
        except OSError as error:
            os.close(self._lock)
            self._lock = -1
            if error.errno in _NOT_LOCKED:
                raise OutputError(f"another process is writing into {self.path}") from None
            return  # a file system without locks
        for name in os.listdir(self.path):
            if name.startswith(_PARTIAL):
                with suppress(OSError):
                    os.unlink(os.path.join(self.path, name))

    def unlock(self) -> None:
        """Let another process write."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def locked(self) -> bool | None:
        """Return True if a living process is writing; None if that is not known."""
        return self._folder.locked(_LOCK)
