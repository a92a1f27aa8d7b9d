"""Every allocation of torchtap may fail: the training goes on with the same losses, and the failure is reported."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchtap as tt
from torchtap.receive import updates

OURS = str(Path(tt.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
EVERY = int(
    os.environ.get("TORCHTAP_MEMORY_EVERY", "61")
)  # of so many allocations one fails; 1 tests all of them
TAPS = {
    "statistics": ["*:output", "*:grad_output", "*:grad_input", "*:param", "*:param_grad", "*:update", ":lr"],
    "reductions": [
        tt.tap("*:output", [tt.Full(), tt.Histogram(), tt.Sample()]),
        tt.tap("*:update", [tt.Histogram(), tt.Full()]),
        tt.tap("*:param_grad", tt.Quantiles()),
        tt.tap("*:optim_state"),
    ],
}


class NoMemory(TorchDispatchMode):
    """Raise out of memory at one of the operations that torchtap calls."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_ours():
            self.count += 1
            if self.count - 1 == self.at:
                raise torch.OutOfMemoryError("an allocation of torchtap failed")
        return func(*args, **(kwargs or {}))


def _is_ours() -> bool:
    """Return True if the code that called torch is torchtap's."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


class Values:
    """Count the values that are recorded."""

    name = "values"

    def __init__(self) -> None:
        self.count = 0

    def write(self, record: Any) -> None:
        self.count += sum(block.values.size for block in record.scalars) + len(record.tensors)

    def close(self) -> None:
        pass


def train(taps: Any, at: int) -> tuple[list[float], list[Tensor], int, list[str], int]:
    """Train three steps; return losses, parameters, the number of our operations, what was lost, values recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    flat = [each for tap in taps for each in (tap if isinstance(tap, list) else [tap])]
    values = Values()
    watch = tt.watch(model, None, flat, sinks=[values]) if flat else None
    if watch is not None:
        watch.follow(optimizer)
    losses = []
    with NoMemory(at) as memory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            loss = model(torch.randn(8, 6)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if watch is not None:
            watch.close()
    parameters = [each.detach().clone() for each in model.parameters()]
    return losses, parameters, memory.count, [] if watch is None else watch.lost, values.count


@pytest.mark.parametrize("room", [1 << 10, 1 << 26], ids=["blocks", "copies"])
@pytest.mark.parametrize("name", TAPS)
def test_an_allocation_that_fails_costs_its_value_and_never_the_training(
    name: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "allowance", lambda nbytes: room)
    losses, parameters, *_ = train([], -1)
    watched, _, count, lost, values = train(TAPS[name], -1)
    assert watched == losses
    assert count > 20
    assert not [each for each in lost if "one piece" not in each]
    for at in range(0, count, EVERY):
        found, after, _, lost, recorded = train(TAPS[name], at)
        assert found == losses, f"allocation {at}"
        assert all(map(torch.equal, after, parameters)), f"allocation {at}"
        reported = any("an allocation of torchtap failed" in each for each in lost)
        assert reported or recorded == values, f"allocation {at}"  # another way may have worked
