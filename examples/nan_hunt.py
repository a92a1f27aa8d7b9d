"""The loss is NaN: at which step, and in which module did it begin?

    python examples/nan_hunt.py

A training whose attention takes the logarithm of its weights. Statistics of every output and gradient are recorded at
every step; `diagnose` names the first value of the first step that is not finite, in the order of execution.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchtap as tt


class LogGate(nn.Module):
    """A gate on a logarithmic scale; nothing keeps its argument above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.log(self.scale)


def main() -> dict[str, Any]:
    """Train until it breaks, then ask the run."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(4, 16))
    model.add_module("gate", LogGate())
    model.add_module("head", nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(32, 4)
    y = -4 * model(x).detach() - 3
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with tt.watch(model, run, ["**:output", "**:grad_output", "**:param"]) as watch:
            for step in range(40):
                with watch.step(step):
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    if step == 12:
                        with torch.no_grad():
                            model.gate.scale.fill_(-0.1)  # what a large step does
                    optimizer.step()
        finding = next(each for each in tt.diagnose(run) if each.kind == "nonfinite")
    print(finding)
    return {"site": finding.site, "step": finding.step}


if __name__ == "__main__":
    main()
