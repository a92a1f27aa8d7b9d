"""Recording all hidden states of 62 blocks in one pass, beside the bare call and beside a hook by hand with a clone.

One sequence of 32 tokens through 62 blocks of a linear layer and an activation, without gradients: at width 256 a block
takes tens of microseconds, so what is added to each counts; at width 1,024 it does not. The recorder is on the model
for all passes, as it is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt
from benchmarks.timing import compare, one_thread

__all__ = ["run"]

_BLOCKS, _TOKENS = 62, 32


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
    with one_thread(), torch.no_grad():
        return [row for width in (256, 1024) for row in _rows(width, 9 if quick else 41)]


def _rows(width: int, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, tokens = Stack(width), torch.randint(0, 100, (1, _TOKENS))
    ways: dict[str, Callable[[Stack], AbstractContextManager[Any]]] = {
        "bare call": _nothing,
        "hook by hand with a clone": _by_hand,
        "record_layers": tt.record_layers,
    }

    def timed(way: Callable[[Stack], AbstractContextManager[Any]]) -> Any:
        @contextmanager
        def entered() -> Iterator[Callable[[], Any]]:
            with way(model):
                yield lambda: model(tokens)

        return entered

    found = compare(
        {name: timed(way) for name, way in ways.items()},
        base="bare call",
        rounds=rounds,
        repeats=10,
        warm_up=3,
    )
    by_hand = found["hook by hand with a clone"].ratio
    bar = by_hand + 0.05 if width == 256 else 1.10
    said = f"≤ a hook with a clone + 0.05 ({bar:.3f})" if width == 256 else "≤ 1.10"
    return [
        {
            "width": width,
            "case": name,
            "with / without": str(ratio),
            "ms": f"{ratio.seconds * 1e3:.2f}",
            "bar": said if name == "record_layers" else "",
            "holds": ratio.verdict(bar) if name == "record_layers" else "",
        }
        for name, ratio in found.items()
    ]


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

    handles = [model.embedding.register_forward_hook(embedded)]
    handles += [layer.register_forward_hook(hook) for layer in model.layers]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
