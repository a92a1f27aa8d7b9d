"""Kill a harvest at random moments and resume it: ``python -m tests.datasets.kills 100 all``.

The second word may also be ``here`` or ``processes``. A third one is the number of kills before a harvest may end.

Each trial kills with SIGKILL again and again until a harvest ends by itself. Then every file must have the bytes of an
uninterrupted harvest, and each (document, position) must be there exactly once.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from tests.datasets.models import SITES, documents, tiny

import torchtap as tt

KINDS = [("here", "float32"), ("here", "int8"), ("processes", "float32"), ("processes", "bfloat16")]


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file but the lock."""
    files = sorted(path for path in folder.iterdir() if path.name != ".lock")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def start(out: Path, engine: str, dtype: str) -> int:
    """Harvest in a process of its own, and in its group if it makes workers; return its id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        torch.set_num_threads(1)
        data = documents(1200, 40) + documents(100, 40)
        workers = 2 if engine == "processes" else 1
        tt.harvest(tiny(), data, SITES, out, window=8, dtype=dtype, engine=engine, workers=workers)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def ended(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG)[0] == child


def shards(out: Path) -> int:
    return sum(name.startswith("shard") for name in os.listdir(out)) if out.exists() else 0


def killed_until_done(out: Path, engine: str, dtype: str, kills: int, rng: random.Random, span: float) -> int:
    """Harvest, kill ``kills`` times at random moments, and let the last one end; return how many were hit alive.

    Every other moment is counted from the first shard that is written, so that work is interrupted, not only the start.
    """
    alive = 0
    for number in range(kills):
        before, child = shards(out), start(out, engine, dtype)
        done = False
        while number % 2 and shards(out) == before and not done:
            done = ended(child)
            time.sleep(0.002)
        time.sleep(rng.uniform(0, span))
        done = done or ended(child)
        alive += not done
        if not done:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    _, status = os.waitpid(start(out, engine, dtype), 0)
    assert status == 0, f"the last harvest failed: {status}"
    return alive


def check(out: Path, plain: Path) -> None:
    """Raise unless the files are those of an uninterrupted harvest, with each row once."""
    assert digests(out) == digests(plain)
    acts = tt.open_activations(out)
    acts.verify()
    rows = list(zip(acts.read("document").tolist(), acts.read("position").tolist(), strict=True))
    assert len(rows) == len(set(rows)) > 0


def main(kills: int, kinds: str, each: int = 5) -> None:
    rng = random.Random(time.time_ns())
    chosen = [kind for kind in KINDS if kinds in (kind[0], "all")]
    with tempfile.TemporaryDirectory() as scratch:
        hit = 0
        for number, (engine, dtype) in enumerate(chosen):
            plain = Path(scratch, f"plain-{number}")
            began = time.monotonic()
            killed_until_done(plain, engine, dtype, 0, rng, 0)
            span = time.monotonic() - began
            for trial in range(kills // each // len(chosen)):
                out = Path(scratch, f"trial-{number}-{trial}")
                hit += killed_until_done(out, engine, dtype, each, rng, span / 4)
                check(out, plain)
                shutil.rmtree(out)
                print(f"{engine} {dtype}: trial {trial}, {hit} killed alive", flush=True)
        print(f"{kills} kills, {hit} of a living harvest: every file as without")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]), given[1], *map(int, given[2:]))
