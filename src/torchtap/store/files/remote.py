"""Runs in object stores and other remote folders, through fsspec (``s3://``, ``gs://``, ``memory://`` ...).

An object appears whole when its upload ends, which is all that the format requires: no renames, no locks. A live writer
cannot be recognized. Needs the extra ``remote`` and the protocol's own package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, final

from torchtap.errors import MissingExtraError, RunCorruptError, needing
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import PartOf, attempt_folder, new_run_id, parse_attempt, rank_folder

__all__ = ["RemoteDestination", "RemoteFile", "RemoteFolder"]


def _connect(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path on it."""
    with needing("fsspec", "remote", who=f"{url} is a remote folder, which"):
        import fsspec
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(f"{url} needs one more package: {error}", extra="remote") from None
    return system, path.rstrip("/")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn the errors of every protocol into ``OSError``, which the writer expects of a failing disk."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@final
class RemoteFile:
    """An object, read by position."""

    reusable = True  # it holds no handle

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path
        facts = system.info(path)
        self.size = self.allocated = int(facts["size"])
        # Protocols have some of these. Without any, a file always counts as replaced.
        known = [
            facts[name] for name in ("ETag", "etag", "LastModified", "mtime", "created") if name in facts
        ]
        self.stamp: object = (self.size, *map(str, known)) if known else object()

    def read(self, offset: int, size: int) -> bytes:
        if size == 0:
            return b""
        found: bytes = self._system.cat_file(self._path, start=offset, end=offset + size)
        if len(found) != size:
            raise RunCorruptError(f"the file ends before byte {offset + size}")
        return found

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


@final
class RemoteFolder:
    """A folder of a remote file system."""

    def __init__(self, url: str, *, system: Any = None) -> None:
        self._system, self._path = (system, url) if system is not None else _connect(url)

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self._path}/{name}", system=self._system)

    def names(self) -> list[str]:
        self._system.invalidate_cache()  # fsspec does not notice that a live run grows
        try:
            found = self._system.ls(self._path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Only the last component: nothing outside of this folder is read, whatever a server answers.
        names = {os.path.basename(str(path).rstrip("/")) for path in found}
        return sorted(names - {"", ".", "..", os.path.basename(self._path)})

    def open(self, name: str) -> RemoteFile:
        return RemoteFile(self._system, f"{self._path}/{name}")

    def locked(self, name: str) -> bool | None:
        return None


@final
class RemoteDestination:
    """One attempt of one rank in a remote folder.

    The next free attempt is looked up, not claimed: two writers of the *same rank* that begin at the same
    moment are not kept apart, as they are on a local disk.
    """

    def __init__(self, run: str, rank: int) -> None:
        self._system, root = _connect(run)
        parent = RemoteFolder(f"{root}/{rank_folder(rank)}", system=self._system)
        with _as_os_error():
            taken = [found for name in parent.names() if (found := parse_attempt(name)) is not None]
        attempt = max(taken, default=-1) + 1
        self.part: PartOf = rank, attempt
        self.run_id = new_run_id()
        self._path = f"{root}/{rank_folder(rank)}/{attempt_folder(attempt)}"
        self.folder: Folder = RemoteFolder(self._path, system=self._system)
        with _as_os_error():
            self._system.makedirs(self._path, exist_ok=True)

    def put(
        self, name: str, buffers: Sequence[bytes | bytearray | memoryview], replaces: Sequence[str] = ()
    ) -> None:
        with _as_os_error():
            self._system.pipe_file(f"{self._path}/{name}", b"".join(buffers))
        for each in replaces:
            with suppress(OSError), _as_os_error():
                self._system.rm_file(f"{self._path}/{each}")

    def sync(self, only: Sequence[str] = ("",)) -> None:
        """Do nothing: an upload that has ended is safe."""

    def release(self) -> None:
        """Do nothing: there is no lock."""
