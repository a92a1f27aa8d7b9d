"""What a typed program of a user's looks like: mypy --strict and pyright must know every type in it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn

import torchtap as tt


def look(model: nn.Module, x: Tensor) -> Tensor:
    with tt.capture(model, "blocks.*:output") as seen:
        model(x)
    value: Tensor = seen[
        "blocks.3:output"
    ]  # what is kept depends on the reduction, so the type is the user's to say
    return value


def train(model: nn.Module, batches: list[Tensor]) -> None:
    taps = [tt.tap("*:output", keep=tt.Stats(), every=10), tt.tap("*:param_grad", tt.Histogram())]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.watch(model, "runs/one", taps) as watch:
        for batch in batches:
            with watch.step():
                loss: Tensor = model(batch).mean()
                loss.backward()
                optimizer.step()
                watch.log(loss=loss)


def read() -> float:
    run = tt.open("runs/one")
    names: list[str] = run.sites()
    series = run.series(names[0], "std")
    tensor = run.tensor(names[0], step=3)
    assert_type(tensor, Tensor)
    return float(series.values[-1])


def judge() -> bool:
    result = tt.compare("runs/one", "runs/two")
    outcome: str = result.outcome
    return outcome == "same" and all(finding.severity != "error" for finding in tt.diagnose("runs/one"))
