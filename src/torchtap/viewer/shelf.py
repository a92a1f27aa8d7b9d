"""Where runs are: the paths that a viewer was given, and the runs that appear below them.

Guarantees:
- a run's name is its path below the folder that was given, so a link stays good while runs come and go;
- what was not given, or lies outside through a link, is never a run here;
- looking reads the names of folders, no file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torchtap.errors import RunNotFoundError
from torchtap.store.files.layout import parse_rank

__all__ = ["FoundRun", "Shelf"]

_DEPTH = 6
_MOST = 20_000


@final
@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run that was found: its name, where it is, and the folder of runs that it lies in, if any."""

    name: str
    path: str
    root: Path | None


def _is_run(names: Sequence[str]) -> bool:
    return any(parse_rank(name) is not None for name in names)


def _below(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Run folders below ``folder``; links are not followed, so nothing outside is reached."""
    try:
        with os.scandir(folder) as listed:
            inner = [entry.name for entry in listed if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    if _is_run(inner):
        yield folder
    elif depth < _DEPTH:
        for name in sorted(inner):
            if not name.startswith("."):
                yield from _below(folder / name, depth + 1)


@final
class Shelf:
    """The paths that were given, and what is found there now."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._given = [os.fspath(path) for path in paths]
        for path in self._given:
            if "://" not in path and not os.path.isdir(path):
                raise RunNotFoundError(f"there is no run and no folder of runs at {path}")
        self.folders = [Path(path).resolve() for path in self._given if self._is_folder(path)]

    @staticmethod
    def _is_folder(path: str) -> bool:
        return "://" not in path and os.path.isdir(path) and not _is_run(os.listdir(path))

    def look(self) -> list[FoundRun]:
        """Every run that is there now: those that were named, and those in the folders."""
        alone: list[str] = []
        found: list[FoundRun] = []
        for path in self._given:
            if "://" in path:
                alone.append(path)
                continue
            place = Path(path).resolve()
            if place in self.folders:
                for run in _below(place):
                    name = place.name if run == place else run.relative_to(place).as_posix()
                    found.append(FoundRun(name, str(run), None if run == place else place))
            elif place.is_dir() and _is_run(os.listdir(place)):
                alone.append(path)
        named = [FoundRun(name, path, None) for name, path in zip(_short_names(alone), alone, strict=True)]
        return _told_apart([*named, *found])[:_MOST]


def _short_names(paths: Sequence[str]) -> list[str]:
    """The last folder of each path; more of it where two would be called the same."""
    parts = [path.rstrip("/").split("/") if "://" in path else Path(path).resolve().parts for path in paths]
    names = [tail[-1] for tail in parts]
    length = 2
    while len(set(names)) < len(names) and length <= max(map(len, parts), default=0):
        names = [
            "/".join(tail[-length:]) if names.count(name) > 1 else name
            for tail, name in zip(parts, names, strict=True)
        ]
        length += 1
    return names


def _told_apart(found: list[FoundRun]) -> list[FoundRun]:
    """Each run once; equal names of different runs carry the folder that they were found in."""
    once = list({run.path: run for run in found}.values())
    seen: dict[str, int] = {}
    for run in once:
        seen[run.name] = seen.get(run.name, 0) + 1
    return [
        FoundRun(f"{run.root.name}/{run.name}", run.path, run.root)
        if seen[run.name] > 1 and run.root
        else run
        for run in once
    ]
