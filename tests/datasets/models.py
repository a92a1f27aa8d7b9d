"""Small models and documents for the tests of datasets, made the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TinyLM(nn.Module):
    """An embedding and two layers that mix neighbours: position matters, padding does not reach earlier tokens."""

    def __init__(self, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, 2 * width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        x = torch.tanh(self.first(x + torch.cumsum(x, 1)))
        return self.second(x)


def tiny() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM().eval()


def documents(count: int, longest: int = 12, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 50, (length,), generator=generator)} for length in lengths]


SITES = ["first:output", "second:output"]


def by_hand(
    model: nn.Module, calls: list[tuple[tuple[Any, ...], dict[str, Any]]], modules: dict[str, nn.Module]
) -> Any:
    """Run a model with plain hooks; return for each call the outputs by name."""
    found: list[dict[str, Tensor]] = []

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            found[-1][name] = value.detach().clone()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    outputs = []
    with torch.no_grad():
        for args, kwargs in calls:
            found.append({})
            outputs.append(model(*args, **kwargs))
    for handle in handles:
        handle.remove()
    return found, outputs
