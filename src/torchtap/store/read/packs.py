"""Read the files of many ranks from few pack files, as if each rank had a folder of its own.

A pack, ``ranks-00000-00063.pack``, holds the files of successive ranks one after the other. It begins with the length
of its index (8 bytes) and the index, a sealed JSON object ``{"check", "files": {path: [offset, size]}}``. Offsets count
from the end of the index. A rank whose folder exists beside the packs is read from its folder.

An index is read when one of its ranks is needed, is bounded in size, and every range in it must lie within the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import final

from torchtap.errors import RunCorruptError
from torchtap.store.files.folder import Folder, OpenFile, folder_of
from torchtap.store.files.layout import parse_pack, parse_rank, rank_folder
from torchtap.store.format.checksum import JSON_LIMIT, UNSEALED, is_sealed, load_json, seal

__all__ = ["PackedRoot", "run_folder", "write_pack"]

_MOST_RANKS = 1 << 16  # of one pack
_BUFFER = 4 << 20


def run_folder(path: str) -> Folder:
    """Return the folder of a run, packed or not."""
    root = folder_of(path)
    return PackedRoot(root) if any(parse_pack(name) for name in root.names()) else root


def write_pack(folder: Path, first: int, last: int, files: Sequence[tuple[str, Folder, str]]) -> None:
    """Write the files of ranks ``first`` to ``last``: for each its path in the run, its folder and its name."""
    sizes: dict[str, list[int]] = {}
    offset = 0
    for path, source, name in files:
        with source.open(name) as opened:
            sizes[path] = [offset, opened.size]
            offset += opened.size
    index = seal(json.dumps({"check": UNSEALED, "files": sizes}).encode())
    with (folder / f"ranks-{first:05d}-{last:05d}.pack").open("xb") as target:
        target.write(len(index).to_bytes(8, "little") + index)
        for path, source, name in files:
            with source.open(name) as opened:
                for start in range(0, sizes[path][1], _BUFFER):
                    target.write(opened.read(start, min(_BUFFER, sizes[path][1] - start)))


@final
class _Pack:
    """One pack file. Its index is read at the first use."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._files: dict[str, tuple[int, int]] | None = None
        self._remote: OpenFile | None = None  # an object needs no handle, so it is looked up once

    def open(self) -> OpenFile:
        if self._remote is not None:
            return self._remote
        opened = self._folder.open(self._name)
        if getattr(opened, "reusable", False):
            self._remote = opened
        return opened

    def files(self) -> dict[str, tuple[int, int]]:
        """Return the offset in the pack and the size of each file."""
        if self._files is None:
            with self.open() as opened:
                length = int.from_bytes(opened.read(0, 8), "little")
                if length > min(JSON_LIMIT, opened.size - 8):
                    raise RunCorruptError(f"{self._name}: its index claims {length} bytes")
                text = opened.read(8, length)
                if not is_sealed(text):
                    raise RunCorruptError(f"{self._name}: its index has no checksum")
                found = load_json(text)
                listed = found.get("files") if isinstance(found, dict) else None
                if not isinstance(listed, dict):
                    raise RunCorruptError(f"{self._name}: its index lists no files")
                self._files = dict(_ranges(listed, 8 + length, opened.size, self._name))
        return self._files


def _ranges(
    listed: dict[str, object], start: int, end: int, pack: str
) -> Iterator[tuple[str, tuple[int, int]]]:
    for path, place in listed.items():
        match place:
            case [int(offset), int(size)] if offset >= 0 and size >= 0 and start + offset + size <= end:
                yield path, (start + offset, size)
            case _:
                raise RunCorruptError(f"{pack}: {path[:80]!r} lies outside of the file")


@final
class _Window:
    """A file inside a pack."""

    def __init__(self, file: OpenFile, start: int, size: int) -> None:
        self._file = file
        self._start = start
        self.size = self.allocated = size
        self.stamp: object = (file.stamp, start)

    def read(self, offset: int, size: int) -> bytes:
        self._check(offset, size)
        return self._file.read(self._start + offset, size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        self._file.read_into(self._start + offset, buffer)

    def _check(self, offset: int, size: int) -> None:
        if offset + size > self.size:
            raise RunCorruptError(f"the file ends before byte {offset + size}")

    def __enter__(self) -> _Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)


@final
class _PackedFolder:
    """A folder inside a pack."""

    def __init__(self, pack: _Pack, path: str) -> None:
        self._pack = pack
        self._path = path

    def child(self, name: str) -> _PackedFolder:
        return _PackedFolder(self._pack, f"{self._path}{name}/")

    def names(self) -> list[str]:
        inside = (path[len(self._path) :] for path in self._pack.files() if path.startswith(self._path))
        return sorted({path.split("/", 1)[0] for path in inside})

    def open(self, name: str) -> _Window:
        place = self._pack.files().get(f"{self._path}{name}")
        if place is None:
            raise FileNotFoundError(f"{self._path}{name} is not in the pack")
        return _Window(self._pack.open(), *place)

    def locked(self, name: str) -> bool | None:
        return False  # nothing is recorded into a pack


@final
class PackedRoot:
    """A run folder with packs in it."""

    def __init__(self, inner: Folder) -> None:
        self._inner = inner
        self._packs: dict[str, _Pack] = {}
        self._ranks: dict[str, _Pack] = {}
        self.names()

    def names(self) -> list[str]:
        found = self._inner.names()
        self._packs = {
            name: self._packs.get(name) or _Pack(self._inner, name) for name in found if parse_pack(name)
        }
        self._ranks = {}
        for name, pack in self._packs.items():
            first, last = parse_pack(name) or (0, -1)
            for rank in range(first, min(last, first + _MOST_RANKS) + 1):
                if rank_folder(rank) not in found:
                    self._ranks[rank_folder(rank)] = pack
        return [*found, *self._ranks]

    def child(self, name: str) -> Folder:
        pack = self._ranks.get(name) if parse_rank(name) is not None else None
        return self._inner.child(name) if pack is None else _PackedFolder(pack, f"{name}/")

    def open(self, name: str) -> OpenFile:
        return self._inner.open(name)

    def locked(self, name: str) -> bool | None:
        return self._inner.locked(name)
