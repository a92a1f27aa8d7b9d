"""Recording all hidden states of 62 blocks in one pass, beside the bare call and beside a hook by hand with a clone.

One sequence of 32 tokens through 62 blocks of a linear layer and an activation, without gradients: at width 256 a block
takes tens of microseconds, so what is added to each counts; at width 1,024 it does not. The recorder is on the model
for all passes. The last row of a width has its time over that of the hook by hand, one right before or after the
other. Where a process happens to have its memory moves that ratio by a tenth either way, so it is taken in several
processes, and the row has the median of theirs and its quartiles.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt
from benchmarks.models import hooked
from benchmarks.timing import Case, Ratio, compare, one_thread, quartiles

__all__ = ["beside_the_hook_here", "run"]

_BLOCKS, _TOKENS = 62, 32
_HOOK = "hook by hand with a clone"


class Stack(nn.Module):
    """An embedding and a stack of residual blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(_BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x


def run(quick: bool = False) -> list[dict[str, Any]]:
    """A row for each width and way."""
    rows = []
    for width in (256, 1024):
        large = width > 256
        for name, ratio in _compared(width, base="bare call", rounds=9 if quick or large else 41).items():
            rows.append(_row(width, name, ratio))
        rows.append(_beside_the_hook(width, processes=3 if quick else 5 if large else 15))
    return rows


def _compared(width: int, base: str, rounds: int) -> dict[str, Ratio]:
    """All ways, or all but the bare call, beside one of them."""
    torch.manual_seed(0)
    model, tokens = Stack(width), torch.randint(0, 100, (1, _TOKENS))

    def timed(way: Callable[[Stack], AbstractContextManager[Any]]) -> Case:
        @contextmanager
        def entered() -> Iterator[Callable[[], Any]]:
            with way(model):
                yield lambda: model(tokens)

        return entered

    cases = {"bare call": timed(_nothing), _HOOK: timed(_by_hand), "record_layers": timed(tt.record_layers)}
    if base == _HOOK:
        del cases["bare call"]
    with one_thread(), torch.no_grad():
        return compare(cases, base=base, rounds=rounds, repeats=10, warm_up=3)


def beside_the_hook_here(width: int) -> tuple[float, float]:
    """The recorder's time over the hook's in this process, and the recorder's seconds."""
    found = _compared(width, base=_HOOK, rounds=21 if width == 256 else 5)["record_layers"]
    return found.ratio, found.seconds


def _beside_the_hook(width: int, processes: int) -> dict[str, Any]:
    script = f"from benchmarks.layers import beside_the_hook_here; print(*beside_the_hook_here({width}))"
    ratios, seconds = [], []
    for _ in range(processes):
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
        ratio, second = map(float, done.stdout.split())
        ratios.append(ratio)
        seconds.append(second)
    low, middle, high = quartiles(ratios)
    found = Ratio(middle, low, high, quartiles(seconds)[1], processes)
    return _row(width, f"record_layers, beside the hook by hand, in {processes} processes", found)


def _row(width: int, name: str, ratio: Ratio, bar: float | None = None) -> dict[str, Any]:
    return {
        "width": width,
        "case": name,
        "with / without": str(ratio),
        "ms": f"{ratio.seconds * 1e3:.2f}",
        "bar": "" if bar is None else f"≤ {bar}",
        "holds": "" if bar is None else ratio.verdict(bar),
    }


@contextmanager
def _nothing(model: Stack) -> Iterator[None]:
    yield


@contextmanager
def _by_hand(model: Stack) -> Iterator[list[Tensor]]:
    """What the recorder replaces: a list of copies, begun again with each pass."""
    states: list[Tensor] = []

    def embedded(module: nn.Module, args: Any, output: Tensor) -> None:
        states.clear()
        states.append(output.clone())

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        states.append(output.clone())

    with hooked(([model.embedding], embedded), (model.layers, hook)):
        yield states
