"""A model in production: keep statistics of its layers for each day, and see when what it is given has changed.

    python examples/production_statistics.py

Each day of requests is one step of a run that holds a few numbers for each layer, however many requests there were. On
the fifth day a feature comes in another unit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchtap as tt


def main() -> dict[str, Any]:
    """Serve eight days and look at the first layer's spread."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "production"
        with tt.watch(model, run, ["*:output", "0:input"]) as watch, torch.no_grad():
            for day in range(8):
                with watch.step(day):
                    for _ in range(20):
                        request = torch.randn(16, 6)
                        if day >= 5:
                            request[:, 2] *= 1000  # grams, no longer kilograms
                        model(request)
        series = tt.open(run).series("0:input", "std")
        spread = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    usual = spread[0]
    changed = [day for day, value in spread.items() if value > 3 * usual]
    print(f"spread of the input by day: {[round(value, 2) for value in spread.values()]}")
    print(f"it changed on day {changed[0]}")
    return {"changed": changed}


if __name__ == "__main__":
    main()
