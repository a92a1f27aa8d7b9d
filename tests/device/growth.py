"""Train for long under a watch and see whether the device's memory grows: ``python -m tests.device.growth [steps]``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from tests.device import lag
from torch import nn

import torchtap as tt

__all__ = ["grown"]


class _Dropped:
    def write(self, record: Any) -> None: ...

    def close(self) -> None: ...


def grown(steps: int, *, warm: int) -> int:
    """Return by how many bytes the device's and the pinned memory grew after the first ``warm`` steps."""
    lag.load()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to("lag")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    value = torch.randn(3, 4, device="lag")
    lag.reset(1, 20.0)
    before = 0
    with tt.watch(model, None, ["*:output", "*:param_grad"], sinks=[_Dropped()]) as watch:
        watch.follow(optimizer)
        for step in range(steps):
            optimizer.zero_grad()
            model(value).square().mean().backward()
            optimizer.step()
            if step % 8 == 0:
                lag.settle()  # a training reads its loss now and then
            if step == warm:
                before = _held()
        after = _held()
    assert lag.counts()["races"] == lag.counts()["faults"] == 0
    return after - before


def _held() -> int:
    lag.settle()
    reserved: int = lag.load().bytes(0)[2]
    return reserved + lag.counts()["pinned"]


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(f"{count:,} steps: {grown(count, warm=100):,} bytes more than after 100")
