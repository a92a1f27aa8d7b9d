"""Damage recordings in many ways and compare them with what they were: the answer is never "same".

    python -m benchmarks.fuzz_compare [how many]

Bytes are flipped, files cut, emptied, filled with junk or removed: in run folders of whole tensors and of statistics,
and in folders of layer files.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import torchtap as tt

__all__ = ["damage", "fuzz"]


def damage(folder: Path, source: random.Random) -> str:
    """Damage one file of a recording so that its values are touched; says what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _holds_values(path))
    path = source.choice(files)
    data = bytearray(path.read_bytes())
    how = source.choice(("flip", "flip", "cut", "empty", "junk", "remove"))
    if how == "flip":
        at = source.randrange(len(data))
        data[at] ^= 1 << source.randrange(8)
        path.write_bytes(bytes(data))
        return f"{path.name}: bit flipped at {at} of {len(data)}"
    if how == "cut":
        at = source.randrange(len(data))
        path.write_bytes(bytes(data[:at]))
        return f"{path.name}: cut to {at} of {len(data)}"
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else source.randbytes(len(data)))
    return f"{path.name}: {how}"


def _holds_values(path: Path) -> bool:
    return path.name.startswith(("tensors-", "scalars-", "layer_", "embedding_"))


def fuzz(count: int) -> Counter[str]:
    """How often each outcome came."""
    outcomes: Counter[str] = Counter()
    source = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        originals = _originals(Path(folder))
        for n in range(count):
            original = originals[n % len(originals)]
            copied = Path(folder) / "copy"
            shutil.copytree(original, copied)
            what = damage(copied, source)
            try:
                outcome = tt.compare(original, copied).outcome
            except tt.TorchtapError:
                outcome = "error"
            if outcome == "same":
                print(f"{original.name}: {what}: called the same")
            outcomes[outcome] += 1
            shutil.rmtree(copied)
    return outcomes


def _originals(folder: Path) -> list[Path]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    for name, keep in (("whole", tt.Full()), ("statistics", tt.Stats())):
        taps = [tt.tap("*:output", keep=keep), tt.tap("*:input", keep=keep)]
        with tt.watch(model, folder / name, taps) as watch, torch.no_grad():
            for _ in range(2):
                with watch.step():
                    model(torch.randn(3, 8))
    (folder / "layers").mkdir()
    for n in range(1, 5):
        torch.save(torch.randn(3, 8), folder / "layers" / f"layer_{n}_output.pt")
    return [folder / "whole", folder / "statistics", folder / "layers"]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(fuzz(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
