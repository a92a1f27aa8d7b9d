"""Kill a harvest at random moments and resume it: ``python -m tests.datasets.kills 100``.

Each trial kills with SIGKILL again and again until a harvest ends by itself. Then every file must have the bytes of an
uninterrupted harvest, and each (document, position) must be there exactly once.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torchtap as tt
from tests.datasets.models import SITES, documents, tiny
data = documents(600, 40) + documents(100, 40)
open(sys.argv[1] + ".began", "w").close()
options = dict(engine="processes", workers=2) if sys.argv[2] == "processes" else {}
tt.harvest(tiny(), data, SITES, sys.argv[1], window=8, dtype=sys.argv[3], **options)
"""
KINDS = [("here", "float32"), ("here", "int8")]


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file but the lock."""
    files = sorted(path for path in folder.iterdir() if path.name != ".lock")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def start(out: Path, engine: str, dtype: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", PROGRAM, str(out), engine, dtype]
    return subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)


def killed_until_done(out: Path, engine: str, dtype: str, kills: int, rng: random.Random, span: float) -> int:
    """Harvest, kill ``kills`` times at random moments, and let the last one end; return how many were hit alive."""
    alive = 0
    began = Path(f"{out}.began")
    for _ in range(kills):
        began.unlink(missing_ok=True)
        process = start(out, engine, dtype)
        while not began.exists() and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, span))
        alive += process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    process = start(out, engine, dtype)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    return alive


def check(out: Path, plain: Path) -> None:
    """Raise unless the files are those of an uninterrupted harvest, with each row once."""
    import torchtap as tt

    assert digests(out) == digests(plain)
    acts = tt.open_activations(out)
    acts.verify()
    rows = list(zip(acts.read("document").tolist(), acts.read("position").tolist(), strict=True))
    assert len(rows) == len(set(rows)) > 0


def main(kills: int, each: int = 5) -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        hit = 0
        for number, (engine, dtype) in enumerate(KINDS):
            plain = Path(scratch, f"plain-{number}")
            began = time.monotonic()
            killed_until_done(plain, engine, dtype, 0, rng, 0)
            span = max(0.3, time.monotonic() - began - 2)
            for trial in range(kills // each // len(KINDS)):
                out = Path(scratch, f"trial-{number}-{trial}")
                hit += killed_until_done(out, engine, dtype, each, rng, span / 3)
                check(out, plain)
                shutil.rmtree(out)
                print(f"{engine} {dtype}: trial {trial}, {hit} killed alive", flush=True)
        print(f"{kills} kills, {hit} of a living harvest: every file as without")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
