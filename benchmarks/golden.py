"""Checking a golden of GPT-2 beside one forward pass, in CPU and wall seconds on one thread, and its size.

A check is one forward pass with sketches of every value, and a digest of every weight. If a value is over the recorded
floor, a second pass measures the noise.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import fastest, one_thread
from torchtap import golden

__all__ = ["run"]


def size_of(model: torch.nn.Module) -> int:
    """Millions of parameters."""
    return round(sum(each.numel() for each in model.parameters()) / 1e6)


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of seconds and bytes with their bars."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    layers = 4 if quick else 12
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers)).eval()
    inputs = {"input_ids": torch.arange(128)[None] % 999, "use_cache": False}
    rounds = 3 if quick else 9
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), one_thread():
        path = golden.record("gpt2", model, inputs, root=folder)
        size = sum(each.stat().st_size for each in Path(path).iterdir())
        clocks = {"CPU": time.process_time, "wall": time.perf_counter}
        times = {
            word: (
                fastest(lambda: model(**inputs), rounds=rounds, clock=clock),
                fastest(lambda: golden.check("gpt2", model, inputs, root=folder), rounds=rounds, clock=clock),
            )
            for word, clock in clocks.items()
        }
    case = f"check GPT-2, {layers} layers, {size_of(model)} M parameters, 128 tokens"
    return [
        *({"case": f"{case}, {word} time", "value": f"{check:.3f} s", "beside": f"forward {forward:.3f} s",
           "bar": f"≤ {2 * forward + 1:.2f} s", "holds": check <= 2 * forward + 1}
          for word, (forward, check) in times.items()),
        {"case": "size of its golden", "value": f"{size / 1e6:.2f} MB", "beside": "", "bar": "≤ 1 MB",
         "holds": size <= 1e6},
    ]  # fmt: skip
