"""From a path or an address to a folder to read, and whether it looks like a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from torchtap.store.files.folder import Folder, LocalFolder
from torchtap.store.files.layout import parse_rank

__all__ = ["folder_of", "is_run", "run_inside"]


def folder_of(path: str) -> Folder:
    """A folder on this machine or, of an address, in an object store."""
    if "://" in path:
        from torchtap.store.files.remote import RemoteFolder

        return RemoteFolder(path)
    return LocalFolder(path)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder looks like a run, without reading it."""
    return any(parse_rank(name) is not None for name in folder_of(os.fspath(path)).names())


def run_inside(path: str, names: Sequence[str]) -> str:
    """A run that was perhaps meant where the folder of all runs was named."""
    for name in sorted(names):
        with suppress(OSError):
            if is_run(os.path.join(path, name)):
                return f"; {name!r} in it is one"
    return ""
