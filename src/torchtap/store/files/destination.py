"""Writing files into one part of a run, so that a file is either whole or not there.

Every file grows under a temporary name and appears by being renamed. That survives the death of the process at
any moment. Against the loss of power only what was synced is safe: `LocalDestination.sync` syncs every file that
has appeared since the last call, and then their folder.

Not here: what is in the files (`scalars`, `tensors`), object stores (`remote`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, final

from torchtap.store.files import system
from torchtap.store.files.allocate import allocate
from torchtap.store.files.folder import Folder, LocalFolder
from torchtap.store.files.layout import LOCK, TEMPORARY, PartOf, attempt_folder, parse_attempt, rank_folder

__all__ = ["Destination", "LocalDestination", "LocalStream", "Stream"]

_ROOM = 16 << 20  # asked for at once by a growing file


class Stream(Protocol):
    """A file that is being written and that nobody sees yet."""

    def append(self, buffer: memoryview) -> None:
        """Add bytes to its end."""

    def commit(self, name: str, head: bytes) -> None:
        """Fill in the reserved beginning and let the file appear."""

    def abort(self) -> None:
        """Leave no trace."""


class Destination(Protocol):
    """Where one part of a run is written."""

    part: PartOf
    folder: Folder

    def put(self, name: str, buffers: Sequence[bytes | memoryview]) -> None:
        """Let a whole file appear, in the stead of an older one of that name."""

    def stream(self, reserve: int) -> Stream:
        """Begin a file whose first ``reserve`` bytes are filled in at the end."""

    def remove(self, name: str) -> None:
        """Remove a file that nothing needs any more."""

    def sync(self, only: Sequence[str] | None = None) -> None:
        """Return when everything that has appeared is on the disk; or those of these files that have."""

    def release(self) -> None:
        """Say that no more will come from this writer."""


@final
class LocalStream:
    """A growing file on this machine."""

    def __init__(self, place: LocalDestination, temporary: str, reserve: int) -> None:
        self._place = place
        self._temporary = temporary
        self._reserve = reserve
        self._end = reserve
        self._allocated = 0  # where the room ends that the file system has set aside
        self._descriptor = system.new_file(temporary)
        try:
            os.lseek(self._descriptor, reserve, os.SEEK_SET)
        except OSError:
            self.abort()
            raise

    def append(self, buffer: memoryview) -> None:
        self._end += len(buffer)
        if self._end > self._allocated:
            room = max(_ROOM, self._end - self._allocated)
            done = allocate(self._descriptor, self._allocated, room)
            self._allocated = self._allocated + room if done else sys.maxsize  # then never asked again
        while len(buffer):
            buffer = buffer[os.write(self._descriptor, buffer) :]

    def commit(self, name: str, head: bytes) -> None:
        if len(head) != self._reserve:
            raise ValueError(f"{self._reserve} bytes are reserved for the head, not {len(head)}")
        if system.write_at(self._descriptor, head, 0) != len(head):
            raise OSError(f"could not write the head of {name}")
        os.ftruncate(self._descriptor, self._end)  # gives back the room that was not needed
        os.close(self._descriptor)
        self._descriptor = -1
        self._place.appear(self._temporary, name)

    def abort(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with suppress(OSError):
            os.unlink(self._temporary)


@final
class LocalDestination:
    """One attempt of one rank, in a folder that no other writer has."""

    def __init__(self, run: str, rank: int) -> None:
        parent = os.path.join(run, rank_folder(rank))
        os.makedirs(parent, exist_ok=True)
        attempt = max(
            (found for name in os.listdir(parent) if (found := parse_attempt(name)) is not None), default=-1
        )
        while True:
            attempt += 1
            try:
                # making a folder is atomic: of two writers exactly one gets this attempt
                os.mkdir(os.path.join(parent, attempt_folder(attempt)))
                break
            except FileExistsError:
                continue
        self.part: PartOf = rank, attempt
        self.path = os.path.join(parent, attempt_folder(attempt))
        self.folder: Folder = LocalFolder(run, (rank_folder(rank), attempt_folder(attempt)))
        self._count = 0
        self._unsynced: list[str] = []
        self._rooted = False
        # Held until this process dies in whatever way, so that readers can tell a live run from an
        # interrupted one.
        self._lock = system.open_lock(os.path.join(self.path, LOCK))
        with suppress(OSError):  # a file system without locks: readers then cannot tell
            system.hold(self._lock)

    def _temporary(self) -> str:
        self._count += 1
        return os.path.join(self.path, f"{TEMPORARY}{self._count}")

    def appear(self, temporary: str, name: str) -> None:
        """Give a finished file its name."""
        os.replace(temporary, os.path.join(self.path, name))
        self._unsynced.append(name)

    def put(self, name: str, buffers: Sequence[bytes | memoryview]) -> None:
        temporary = self._temporary()
        try:
            descriptor = system.new_file(temporary)
            try:
                system.write_all(descriptor, buffers)
            finally:
                os.close(descriptor)
            self.appear(temporary, name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def stream(self, reserve: int) -> LocalStream:
        return LocalStream(self, self._temporary(), reserve)

    def remove(self, name: str) -> None:
        os.unlink(os.path.join(self.path, name))

    def sync(self, only: Sequence[str] | None = None) -> None:
        names = [name for name in self._unsynced if only is None or name in only]
        if not names:
            return
        self._unsynced = [name for name in self._unsynced if only is not None and name not in only]
        try:
            # One that is gone was merged into a wider segment meanwhile, which was synced first.
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
