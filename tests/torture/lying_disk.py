"""A disk that loses power, and one that lies: what was flushed is there afterwards, and nothing is ever wrong.

The recorder's calls of the operating system are written down and played on a model of a disk. The model keeps apart
what is in the cache and what is safe: bytes of a file are safe once the file was synced, names in a folder once the
folder was. At a random moment the power fails. Of what was not safe, any part survives in any order: a name without
its bytes, a removed name, bytes torn in the middle, blocks of zeros. Every state that can come out of this must be
readable.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from unittest.mock import patch

from tests.store.records import SITES, image, number, record
from tests.torture import limit
from tests.torture.damage import Tally, memory_disk

from torchtap.errors import RunCorruptError, TorchtapError
from torchtap.store.files import folder as destination_module
from torchtap.store.files import system
from torchtap.store.read.reader import Run, open_run
from torchtap.store.read.results import Series
from torchtap.store.write.writer import RunWriter

__all__ = ["lost_power"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Inode:
    """A file: what the process sees, and what the disk has for sure."""

    cached: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


@dataclass
class Disk:
    """Folders as maps from names to files; ``pending`` are the changes of names that no sync has made safe."""

    names: dict[str, Inode] = field(default_factory=dict)
    safe_names: dict[str, Inode] = field(default_factory=dict)
    pending: list[tuple[str, str, Inode | None]] = field(
        default_factory=list
    )  # folder, name, what it then is
    # The writer's thread works while power is lost: a call has happened or has not.
    lock: threading.RLock = field(default_factory=threading.RLock)

    def change(self, path: str, inode: Inode | None) -> None:
        self.pending.append((os.path.dirname(path), path, inode))
        if inode is None:
            self.names.pop(path, None)
        else:
            self.names[path] = inode

    def sync_folder(self, folder: str) -> None:
        for where, path, inode in [entry for entry in self.pending if entry[0] == folder]:
            self.pending.remove((where, path, inode))
            if inode is None:
                self.safe_names.pop(path, None)
            else:
                self.safe_names[path] = inode

    def after_power_loss(self, chance: random.Random) -> dict[str, bytes]:
        """One of the states in which the disk may be found."""
        with self.lock:
            return self._after_power_loss(chance)

    def _after_power_loss(self, chance: random.Random) -> dict[str, bytes]:
        names = dict(self.safe_names)
        survivors = [change for change in self.pending if chance.random() < 0.5]
        chance.shuffle(survivors)
        for _, path, inode in survivors:
            if inode is None:
                names.pop(path, None)
            else:
                names[path] = inode
        return {path: _torn(inode, chance) for path, inode in names.items()}


def _torn(inode: Inode, chance: random.Random) -> bytes:
    """The safe bytes, and of the others what a cache that writes back as it likes may have written."""
    if bytes(inode.cached) == inode.safe:
        return inode.safe
    way = chance.randrange(4)
    if way == 0:
        return inode.safe
    if way == 1:
        return bytes(inode.cached)
    mixed = bytearray(inode.cached)
    if way == 2:
        del mixed[chance.randrange(len(mixed) + 1) :]
    for start in range(0, len(mixed), 512):
        if chance.random() < 0.3:
            old = inode.safe[start : start + 512]
            mixed[start : start + 512] = old + bytes(min(512, len(mixed) - start) - len(old))
    return bytes(mixed)


def _at_once(
    call: Callable[Concatenate[WatchedOS, P], R],
) -> Callable[Concatenate[WatchedOS, P], R]:
    """A call that a loss of power finds either done or not begun."""

    @wraps(call)
    def alone(self: WatchedOS, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.disk.lock:
            return call(self, *args, **kwargs)

    return alone


class WatchedOS:
    """The ``os`` of the store's files: does everything, and writes down what the disk was told."""

    def __init__(self, disk: Disk, root: str) -> None:
        self.disk = disk
        self._root = root
        self._open: dict[int, tuple[str, Inode | None]] = {}
        self._position: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @_at_once
    def open(self, path: str, flags: int, mode: int = 0o777, **options: Any) -> int:
        descriptor = os.open(path, flags, mode, **options)
        if "dir_fd" not in options:
            if flags & os.O_CREAT and path not in self.disk.names:
                self.disk.change(path, Inode())
            self._open[descriptor] = path, self.disk.names.get(path)
            self._position[descriptor] = 0
        return descriptor

    @_at_once
    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        os.close(descriptor)

    def _put(self, descriptor: int, data: bytes, at: int) -> None:
        inode = self._open[descriptor][1]
        assert inode is not None
        if len(inode.cached) < at:
            inode.cached.extend(bytes(at - len(inode.cached)))
        inode.cached[at : at + len(data)] = data

    @_at_once
    def write(self, descriptor: int, data: Any) -> int:
        count = os.write(descriptor, data)
        self._put(descriptor, bytes(data)[:count], self._position[descriptor])
        self._position[descriptor] += count
        return count

    @_at_once
    def writev(self, descriptor: int, buffers: Sequence[Any]) -> int:
        count = os.writev(descriptor, buffers)
        self._put(descriptor, b"".join(bytes(one) for one in buffers)[:count], self._position[descriptor])
        self._position[descriptor] += count
        return count

    @_at_once
    def pwrite(self, descriptor: int, data: bytes, at: int) -> int:
        count = os.pwrite(descriptor, data, at)
        self._put(descriptor, data[:count], at)
        return count

    @_at_once
    def lseek(self, descriptor: int, position: int, how: int) -> int:
        self._position[descriptor] = position
        return os.lseek(descriptor, position, how)

    @_at_once
    def ftruncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)
        inode = self._open[descriptor][1]
        assert inode is not None
        del inode.cached[size:]

    @_at_once
    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)
        inode = self.disk.names[source]
        self.disk.change(source, None)
        self.disk.change(target, inode)

    @_at_once
    def unlink(self, path: str) -> None:
        os.unlink(path)
        self.disk.change(path, None)

    @_at_once
    def fsync(self, descriptor: int) -> None:
        path, inode = self._open[descriptor]
        if inode is not None:
            inode.safe = bytes(inode.cached)
        else:
            self.disk.sync_folder(path)


def lost_power(count: int, seed: int) -> Tally:
    """Record with merges, lose power at random moments, and read what the disk has then."""
    tally = Tally()
    chance = random.Random(seed)
    while tally.get("power losses", 0) < count and not limit.over():
        disk = Disk()
        with tempfile.TemporaryDirectory(dir=memory_disk()) as name:
            run = os.path.join(name, "run")
            flushed = -1
            watched = WatchedOS(disk, run)
            with patch.object(destination_module, "os", watched), patch.object(system, "os", watched):
                writer = RunWriter(
                    run, manifest={}, flush_seconds=chance.choice((0.001, 60.0)), segment_bytes=6000
                )
                for step in range(chance.choice((3, 20, 60))):
                    writer.write(record(step, tensors=step % 3, size=(8, 400)[step % 2]))
                    if chance.random() < 0.4:
                        writer.flush()
                        flushed = step
                    if chance.random() < 0.2:
                        state = disk.after_power_loss(chance)
                        _check(state, run, flushed, Path(name) / "after", tally)
                writer.close()
    return tally


def _series(run: Run, tally: Tally) -> Series:
    """A number over time; where a file is torn, what else there is."""
    try:
        return run.series(SITES[0], "mean")
    except RunCorruptError:
        tally.count("torn behind the last flush, and told")
        return run.series(SITES[0], "mean", partial=True)


def _check(state: dict[str, bytes], run: str, flushed: int, after: Path, tally: Tally) -> None:
    import shutil

    shutil.rmtree(after, ignore_errors=True)
    for path, content in state.items():
        target = after / os.path.relpath(path, run)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    tally.count("power losses")
    if not after.exists():
        assert flushed < 0, "everything is gone"
        return
    try:
        found = open_run(after)
    except TorchtapError:
        assert flushed < 0, "a run with flushed steps cannot be opened"
        tally.count("before the first flush")
        return
    steps = found.steps().tolist()
    assert set(range(flushed + 1)) <= set(steps), f"flushed up to {flushed}, found {steps}"
    if SITES[0] in found.sites():
        series = _series(found, tally)
        values = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        assert set(range(flushed + 1)) <= set(values)
        for step, value in values.items():  # a file that was never flushed may be torn
            assert value == number(step, 0, 0) or (step > flushed and math.isnan(value)), (step, value)
    stored = {(ref.step, ref.field) for ref in found.tensors()}
    for step in range(flushed + 1):
        for index in range(step % 3):
            field_ = f"value{index}" if index else "value"
            assert (step, field_) in stored, f"the tensor of the flushed step {step} is gone"
            assert (
                found.array(SITES[0], step, field_).tobytes()
                == image(step + index, (8, 400)[step % 2]).tobytes()
            )
    tally["flushed steps, all there"] = tally.get("flushed steps, all there", 0) + flushed + 1
