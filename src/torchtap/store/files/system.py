"""What operating systems do differently: locks, opening without following links, reading and writing at a place.

Everything else of the store is the same everywhere. On Linux and macOS the calls are the kernel's own. Where one is
missing, as on Windows, there is a longer way to the same result, with two things less:
- links are refused by looking before opening, so that a link planted in between is followed;
- a disk's promise to have a folder's entries cannot be had; files themselves are synced.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec

__all__ = [
    "allocated_bytes",
    "has_numbered_locks",
    "hold",
    "hold_number",
    "is_held",
    "locked_for_a_moment",
    "names_below",
    "new_file",
    "number_is_held",
    "open_below",
    "open_lock",
    "read_at",
    "refuse_link",
    "sync",
    "write_all",
    "write_all_at",
]


_BUFFERS_A_CALL = 512  # well below IOV_MAX


def _flags(*names: str) -> int:
    """Flags of `os.open`, as far as this system has them."""
    return sum(getattr(os, name, 0) for name in names)


# Bytes as they are, and not handed on to programs that are started.
_PLAIN = _flags("O_CLOEXEC", "O_NOINHERIT", "O_BINARY")
_READ = os.O_RDONLY | _PLAIN | _flags("O_NOFOLLOW", "O_NONBLOCK")
_FOLDER = os.O_RDONLY | _PLAIN | _flags("O_DIRECTORY")
_walks_by_descriptor = os.open in os.supports_dir_fd and os.listdir in os.supports_fd
_has_flock = find_spec("fcntl") is not None
_has_locking = find_spec("msvcrt") is not None
# One place for a file's position is one too few for two threads.
_positions = threading.Lock()


def new_file(path: str) -> int:
    """A descriptor of a file that was not there."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _PLAIN, 0o666)


def open_lock(path: str) -> int:
    """Open a new lock file; return its descriptor. A link is refused."""
    return os.open(path, os.O_CREAT | os.O_RDWR | _PLAIN | _flags("O_NOFOLLOW"), 0o666)


def hold(descriptor: int) -> None:
    """Hold a file until the descriptor is closed or the process dies in whatever way; ``OSError`` where that fails."""
    if _has_flock:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif _has_locking:
        _lock_first_byte(descriptor)


def is_held(descriptor: int) -> bool | None:
    """Whether a living process holds a file; None where nobody can tell. Forgets the question at once."""
    try:
        if _has_flock:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        elif _has_locking:
            _lock_first_byte(descriptor)
        else:
            return None
    except (BlockingIOError, PermissionError):  # PermissionError is how Windows says it
        return True
    except OSError:
        return None
    return False


def has_numbered_locks() -> bool:
    """Return True if one file can hold a lock for each of several processes (Linux)."""
    if not _has_flock:
        return False
    import fcntl

    return hasattr(fcntl, "F_OFD_SETLK")


def _numbered(kind: int, number: int) -> bytes:
    # struct flock: type, whence, start, length, process. Far behind the end of the file, where no bytes are.
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, (1 << 40) + number, 1, 0)


def hold_number(descriptor: int, number: int) -> None:
    """Hold one of a file's numbered locks until the descriptor is closed or the process dies."""
    import fcntl

    with suppress(OSError):  # a file system without locks: readers take the recording for a live one
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _numbered(fcntl.F_WRLCK, number))


def number_is_held(descriptor: int, number: int) -> bool | None:
    """Return True if a living process holds a numbered lock; None if that is not known."""
    if not has_numbered_locks():
        return None
    import fcntl

    try:
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _numbered(fcntl.F_RDLCK, number))
    except OSError:
        return None
    return bool(struct.unpack("hhqqi4x", found)[0] != fcntl.F_UNLCK)


@contextmanager
def locked_for_a_moment(descriptor: int) -> Iterator[None]:
    """Keep other processes out of a file for the few calls of this block."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock_first_byte(descriptor: int) -> None:
    """Windows: locks are of bytes, also of some that a file does not have yet."""
    import msvcrt

    os.lseek(descriptor, 0, os.SEEK_SET)
    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]


def open_below(root: str, inside: Sequence[str], name: str) -> int:
    """A descriptor of a file below a folder, for reading. Below ``root`` no link is followed."""
    if _walks_by_descriptor:
        folder = _folder_below(root, inside)
        try:
            return os.open(name, _READ, dir_fd=folder)
        finally:
            os.close(folder)
    return os.open(_without_links(root, (*inside, name)), _READ)


def names_below(root: str, inside: Sequence[str]) -> list[str]:
    """What is in a folder below another."""
    if _walks_by_descriptor:
        folder = _folder_below(root, inside)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)
    return os.listdir(_without_links(root, inside))


def _folder_below(root: str, inside: Sequence[str]) -> int:
    descriptor = os.open(root, _FOLDER)
    try:
        for name in inside:
            deeper = os.open(name, _FOLDER | _flags("O_NOFOLLOW"), dir_fd=descriptor)
            os.close(descriptor)
            descriptor = deeper
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _without_links(root: str, inside: Sequence[str]) -> str:
    path = root
    for name in inside:
        path = os.path.join(path, name)
        refuse_link(path)
    return path


def refuse_link(path: str) -> None:
    """Raise ``OSError`` if a path is a link."""
    facts = os.lstat(path)
    # A junction is Windows' other link; it is a reparse point as well.
    reparse = getattr(facts, "st_file_attributes", 0) & getattr(stat, "FILE_ATTRIBUTE_REPARSE_POINT", 0)
    if stat.S_ISLNK(facts.st_mode) or reparse:
        raise OSError(f"{path} is a link, which is not followed inside a run")


def allocated_bytes(facts: os.stat_result) -> int:
    """How many bytes of a file are really there; all of them where the system does not say."""
    blocks: int | None = getattr(facts, "st_blocks", None)
    return facts.st_size if blocks is None else blocks * 512


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read into a buffer from a place in a file; how much there was."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    with _positions:
        os.lseek(descriptor, offset, os.SEEK_SET)
        found = os.read(descriptor, len(buffer))
    buffer[: len(found)] = found
    return len(found)


def write_all(descriptor: int, buffers: Sequence[bytes | memoryview]) -> None:
    """Append buffers to a file, all of them."""
    together = getattr(os, "writev", None)
    _write_each(
        buffers,
        lambda views, done: together(descriptor, views) if together else os.write(descriptor, views[0]),
    )


def write_all_at(descriptor: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    """Write buffers one after the other from a place in a file on."""
    _write_each(buffers, lambda views, done: os.pwritev(descriptor, views, offset + done))


def _write_each(buffers: Sequence[bytes | memoryview], write: Callable[[list[memoryview], int], int]) -> None:
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    done = 0
    while views:
        count = write(views[:_BUFFERS_A_CALL], done)
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def sync(path: str) -> None:
    """Return when a file, or a folder's entries, are on the disk. What has gone meanwhile needs no sync."""
    on_windows = os.name == "nt"
    with suppress(FileNotFoundError):
        if on_windows and os.path.isdir(path):
            return  # Windows opens no folders
        # Windows syncs only what could be written.
        descriptor = os.open(path, (os.O_RDWR if on_windows else os.O_RDONLY) | _PLAIN)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
