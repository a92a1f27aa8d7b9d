"""An operating system that refuses at random: the caller never notices, and what was lost is told."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.store.records import SITES, number, record
from tests.torture import limit
from tests.torture.damage import Tally, memory_disk

from torchtap.errors import TorchtapError
from torchtap.store.files import folder as destination_module
from torchtap.store.read.reader import open_run
from torchtap.store.write.writer import RunWriter

__all__ = ["failing_disk"]

_ERRORS = (
    errno.ENOSPC,
    errno.EIO,
    errno.EMFILE,
    errno.EROFS,
    errno.EDQUOT,
    errno.EINTR,
    errno.ENOENT,
    errno.EACCES,
)
_CALLS = ("open", "write", "writev", "pwrite", "rename", "unlink", "fsync", "ftruncate", "lseek")


class FailingOS:
    """The ``os`` of the store's files, some of whose calls fail, or write less than they were given."""

    def __init__(self, chance: random.Random, rate: float) -> None:
        self._chance = chance
        self.rate = rate
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in _CALLS:
            return call

        def maybe(*args: Any, **options: Any) -> Any:
            if self._chance.random() < self.rate:
                self.failed += 1
                if name == "write" and self._chance.random() < 0.5 and len(args[1]) > 1:
                    return call(args[0], args[1][: self._chance.randrange(1, len(args[1]))])
                number_ = self._chance.choice(_ERRORS)
                raise OSError(number_, os.strerror(number_))
            return call(*args, **options)

        return maybe


def failing_disk(count: int, seed: int) -> Tally:
    """So many recordings on a disk that fails at random; half of them heal before the end."""
    tally = Tally()
    chance = random.Random(seed)
    for _ in range(count):
        if limit.over():
            break
        with tempfile.TemporaryDirectory(dir=memory_disk()) as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            failing = FailingOS(chance, chance.choice((0.02, 0.2, 0.9)))
            steps = chance.choice((4, 20))
            with patch.object(destination_module, "os", failing):
                writer = RunWriter(Path(name) / "run", manifest={}, flush_seconds=0.002, segment_bytes=5000)
                for step in range(steps):
                    writer.write(record(step, tensors=step % 3, size=(8, 300)[step % 2]))
                    if chance.random() < 0.4:
                        writer.flush()
                if chance.random() < 0.5:
                    failing.rate = 0.0
                writer.close()
            _check(Path(name) / "run", steps, writer, tally)
            tally["failed calls"] = tally.get("failed calls", 0) + failing.failed
    return tally


def _check(folder: Path, steps: int, writer: RunWriter, tally: Tally) -> None:
    tally.count("recordings on a failing disk")
    try:
        run = open_run(folder)
    except TorchtapError:
        assert writer.lost, "nothing can be read, and nothing was said to be lost"
        tally.count("of them lost, and told")
        return
    found = run.series(SITES[0], "mean") if "mean" in run.statistics() else None
    there = found.steps.tolist() if found is not None else []
    if found is not None:
        assert found.values.tolist() == [number(step, 0, 0) for step in there]
    for ref in run.tensors():
        run.array(ref.site, ref.step, ref.field)
    tensors = len(run.tensors())
    whole = len(there) == steps and tensors == sum(step % 3 for step in range(steps))
    assert whole or writer.lost, "something is missing, and nothing was said to be lost"
    tally.count("of them whole" if whole else "of them lost in part, and told")
