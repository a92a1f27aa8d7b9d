"""Peak memory of a training with and without torchtap, each in a process of its own, one after another.

A GPT of 100 million to a billion parameters trains for a few steps with a short sequence, so that parameters and what
the optimizer holds make up nearly all of the memory. The peak is the kernel's own (`VmHWM`). `added` is the peak
beyond that of the same training without torchtap; `allowed` is 2 % of the parameters' bytes, at least 64 MiB, plus 64
MiB for code and for buffers on the host. Rows that hold whole tensors on purpose have no bar.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt
from benchmarks.timing import one_thread
from torchtap.integrations.zero_code.settings import DEFAULT_SITES

__all__ = ["cases", "run"]

_MIB = 1 << 20
_MARK = "__peak__"
# Width, layers and vocabulary: about 100 million, 350 million and a billion parameters.
_SIZES = {"103 M": (768, 12, 24_000), "354 M": (1024, 24, 50_000), "1.0 B": (1536, 32, 64_000)}
_KINDS = (
    "output",
    "input",
    "grad_output",
    "grad_input",
    "param",
    "param_grad",
    "update",
    "optim_state",
    "buffer",
)
_REDUCTIONS: dict[str, Callable[[], Any]] = {
    "Stats": tt.Stats,
    "Histogram": tt.Histogram,
    "Quantiles": tt.Quantiles,
    "Sample": tt.Sample,
    "TopK": lambda: tt.TopK(8),
}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows of all sizes; of the kinds and reductions, those of the smallest model."""
    rows = []
    sizes = list(_SIZES)[:1] if quick else list(_SIZES)
    for size in sizes:
        peaks: dict[str, dict[str, int]] = {}
        for case in cases(size == sizes[0]):
            base = _base_of(case)
            for each in (base, case):
                if each not in peaks:
                    peaks[each] = _peak(size, each)
            rows.append(_row(size, case, peaks[base], peaks[case]))
    return rows


def cases(every: bool) -> list[str]:
    """Return what is measured: the default plan and the doctor, or every kind and reduction, too."""
    found = ["default plan", "default plan, SGD", "default plan, unknown optimizer", "doctor"]
    if every:
        found += [f"kind {kind}" for kind in _KINDS]
        found += [f"param by {name}" for name in _REDUCTIONS] + ["capture of outputs", "compare"]
    return found


def _base_of(case: str) -> str:
    if case in ("capture of outputs", "compare"):
        return "plain pass"
    return (
        "plain, SGD" if case.endswith("SGD") else "plain, unknown optimizer" if "unknown" in case else "plain"
    )


def _row(size: str, case: str, base: dict[str, int], found: dict[str, int]) -> dict[str, Any]:
    parameters = base["parameters"]
    added, allowed = found["peak"] - base["peak"], max(64 * _MIB, parameters // 50) + 64 * _MIB
    holds_tensors = case in ("capture of outputs", "compare")
    return {
        "parameters": size,
        "case": case,
        "bytes of parameters": f"{parameters // _MIB:,} MiB",
        "plain": f"{base['peak'] // _MIB:,} MiB",
        "added": f"{added // _MIB:,} MiB",
        "of the parameters": f"{added / parameters:.1%}",
        "allowed": "" if holds_tensors else f"{allowed // _MIB:,} MiB",
        "holds": "" if holds_tensors else "yes" if added <= allowed else "no",
    }


def _peak(size: str, case: str) -> dict[str, int]:
    """Train in another process, and return its peak and the bytes of its parameters."""
    command = [sys.executable, "-m", "benchmarks.memory", size, case]
    # Every tensor in pages of its own: otherwise holes in the allocator's heap, of hundreds of MiB, decide.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, int] = json.loads(done.stdout.rpartition(_MARK)[2])
    return found


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.normed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed)
        hidden: Tensor = x + self.down(nn.functional.gelu(self.up(self.normed(x))))
        return hidden


class _Gpt(nn.Module):
    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.embedding(x)))
        return (hidden @ self.embedding.weight[:64].t()).float()


class _Sign(torch.optim.Optimizer):
    """An optimizer whose arithmetic torchtap does not know."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(each.grad.sign_(), alpha=-group["lr"])


def _train(model: _Gpt, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        words = torch.arange(32, device=model.embedding.weight.device).unsqueeze(0) + step
        loss = nn.functional.cross_entropy(model(words).view(-1, 64), words.view(-1) % 64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _work(model: _Gpt, case: str) -> None:
    """Do what a case is about, in this process."""
    if case.startswith(("plain pass", "capture", "compare")):
        words = torch.arange(32, device=model.embedding.weight.device).unsqueeze(0)
        with torch.no_grad():
            if case == "capture of outputs":
                with tt.capture(model, "*:output"):
                    model(words)
            elif case == "compare":
                tt.compare(model, model, words)
            else:
                model(words)
        return
    if case.endswith("SGD"):
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    elif "unknown" in case:
        optimizer = _Sign(model.parameters(), {"lr": 1e-4})
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    if case.startswith("plain"):
        _train(model, optimizer)
        return
    with tempfile.TemporaryDirectory() as folder:
        if case == "doctor":
            with tt.doctor(model, optimizer, run=folder, quiet=True):
                _train(model, optimizer)
            return
        taps: Any = list(DEFAULT_SITES)
        if case.startswith("kind "):
            taps = f"*:{case.removeprefix('kind ')}"
        elif case.startswith("param by "):
            taps = tt.tap("*:param", _REDUCTIONS[case.removeprefix("param by ")]())
        with tt.watch(model, folder, taps) as watch:
            watch.follow(optimizer)
            _train(model, optimizer)


def _main(size: str, case: str) -> None:
    with one_thread():
        torch.manual_seed(0)
        model = _Gpt(*_SIZES[size])
        _work(model, case)
    peak = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    parameters = sum(each.numel() * each.element_size() for each in model.parameters())
    print(_MARK + json.dumps({"peak": int(peak.split()[1]) * 1024, "parameters": parameters}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
