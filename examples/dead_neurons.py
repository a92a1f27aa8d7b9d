"""Half of a layer's neurons never fire: see which, take them out, and have a smaller model with the same answers.

    python examples/dead_neurons.py

The share of zeros does not show it: many neurons are zero half of the time anyway. `Units` counts the neurons that are
zero for every example, `diagnose` tells of them, and ``fired`` says which to keep.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchtap as tt


def main() -> dict[str, Any]:
    """Train a little with a bad start, look, and cut."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    with torch.no_grad():
        model[0].bias[:32] = -50.0  # too large a step somewhere has driven these away
    x = torch.randn(256, 8)
    y = x.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with tt.watch(model, run, [tt.tap("1:output", tt.Units()), tt.tap("1:output")]) as watch:
            for step in range(20):
                with watch.step(step):
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
        findings = [str(each) for each in tt.diagnose(run)]
    print("\n".join(findings))
    with tt.capture(model, "1:output", keep=tt.Units()) as seen:
        expected = model(x)
    fired = seen["1:output"]["fired"]
    smaller = nn.Sequential(nn.Linear(8, int(fired.sum())), nn.ReLU(), nn.Linear(int(fired.sum()), 1))
    with torch.no_grad():
        smaller[0].weight.copy_(model[0].weight[fired])
        smaller[0].bias.copy_(model[0].bias[fired])
        smaller[2].weight.copy_(model[2].weight[:, fired])
        smaller[2].bias.copy_(model[2].bias)
    error = (smaller(x) - expected).abs().max().item()
    print(f"{int((~fired).sum())} of {len(fired)} neurons taken out; the answers differ by {error:.1e}")
    return {"findings": findings, "kept": int(fired.sum()), "error": error}


if __name__ == "__main__":
    main()
