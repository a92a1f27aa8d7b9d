"""Training and serving give different numbers: which module is it, and where is its code?

    python examples/training_and_serving.py

The model that serves was written again and divides by another constant. Both are run on one batch; `compare` names the
first module whose own code makes a difference, and the line of its forward.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt


class Normalise(nn.Module):
    """As the training has it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)


class ServedNormalise(nn.Module):
    """As somebody wrote it again for serving."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    """A normalised linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = Normalise(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def main() -> dict[str, Any]:
    """Compare the two."""
    torch.manual_seed(0)
    training = nn.Sequential(*(Block() for _ in range(4))).eval()
    serving = copy.deepcopy(training)
    serving[2].norm = ServedNormalise()
    result = tt.compare(training, serving, inputs=(torch.randn(8, 16),))
    print(result)
    assert result.first is not None
    return {"module": result.first.module, "source": result.first.source}


if __name__ == "__main__":
    main()
