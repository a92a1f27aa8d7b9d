"""Measure torchtap on the accelerator of this machine: ``python -m benchmarks.device [--device cuda]``.

Prints what the device can do, whether numbers are right, whether the host waits, and what recording costs. Send the
table in if your device is listed as "expected" in ``docs/devices.md``.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import torchtap as tt
from torchtap.reduce import device_kernel
from torchtap.reduce.device_copy import line_to

_WARM, _STEPS, _TURNS, _BLOCKS = 10, 30, 5, 6
Around = Callable[[nn.Module], AbstractContextManager[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument(
        "--device", default=None, help="cuda, xpu, mps, npu, hpu …; the accelerator by default"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small model and few steps: a glance, not a result"
    )
    options = parser.parse_args()
    asked, found = options.device, torch.accelerator.current_accelerator()
    if found is None or (asked and torch.device(asked).type == "cpu"):
        print("torch finds no accelerator here" if found is None else "the CPU is no accelerator")
        return
    if options.quick:
        globals().update(_WARM=1, _STEPS=2, _TURNS=1, _BLOCKS=1)
    device = torch.empty(0, device=asked or found).device
    line = line_to(device)
    rows = [
        ("device", f"{device}, torch {torch.__version__}, {platform.platform()}"),
        ("copies beside the computation", "yes" if line._side is not None else "no"),
        ("events and pinned memory", "yes" if line.asynchronous else "no: each copy waits"),
        ("statistics in", str(line.wide).removeprefix("torch.")),
        ("kernel", "Triton" if device_kernel.reads(torch.ones(1, device=device)) else "torch ops"),
        ("largest relative error", f"{_error(device):.1e}"),
        (
            "losses with taps",
            "identical" if _losses(device, True) == _losses(device, False) else "NOT identical",
        ),
        ("host ahead of the device", _ahead(device)),
    ]
    plain = _seconds(device, lambda _: nullcontext())
    taps = {
        "outputs": ["*:output"],
        "outputs and gradients": ["*:output", "*:grad_output"],
        "everything": ["*:output", "*:grad_output", "*:param", "*:param_grad", "*:update"],
    }
    rows.append(("a step without taps", f"{plain * 1e3:.2f} ms"))
    for name, sites in taps.items():
        taken = _seconds(device, lambda model, sites=sites: tt.watch(model, None, sites, sinks=[_Dropped()]))
        rows.append((f"with {name}", f"{taken * 1e3:.2f} ms, {taken / plain:.3f} ×"))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"| {name:{width}} | {text} |")


class _Dropped:
    def write(self, record: Any) -> None: ...

    def close(self) -> None: ...


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True) for _ in range(_BLOCKS)]
    return nn.Sequential(*blocks).to(device)


def _train(model: nn.Module, optimizer: Any, value: torch.Tensor, steps: int) -> list[torch.Tensor]:
    losses = []
    for _ in range(steps):
        loss = model(value).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _seconds(device: torch.device, around: Around) -> float:
    """Return the time of a step: the median of several turns."""
    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    value = torch.randn(8, 128, 384, device=device)
    taken = []
    with around(model) as watch:
        if watch is not None:
            watch.follow(optimizer)
        _train(model, optimizer, value, _WARM)
        for _ in range(_TURNS):
            torch.accelerator.synchronize(device)
            began = time.perf_counter()
            _train(model, optimizer, value, _STEPS)
            torch.accelerator.synchronize(device)
            taken.append((time.perf_counter() - began) / _STEPS)
    return statistics.median(taken)


def _losses(device: torch.device, tapped: bool) -> list[float]:
    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    value = torch.ones(2, 16, 384, device=device)
    with (
        tt.watch(model, None, ["*:output", "*:grad_output"], sinks=[_Dropped()])
        if tapped
        else nullcontext() as watch
    ):
        if watch is not None:
            watch.follow(optimizer)
        return [loss.item() for loss in _train(model, optimizer, value, 4)]


def _error(device: torch.device) -> float:
    """Return the largest error of a statistic, against float64 on the CPU."""
    from torchtap.reduce.stats import StatsBlock

    values = [torch.randn(300, 700) * 10 + 3, torch.randn(50), torch.randn(2000, 1000)]
    block, wanted = StatsBlock(len(values)), StatsBlock(len(values))
    for row, value in enumerate(values):
        block.measure_into(row, 0, value.to(device))
        wanted.measure_into(row, 0, value.double())
    one, other = block.results()[:, 2:9], wanted.results()[:, 2:9]  # std to rms; means may be near zero
    return float((abs(one - other) / abs(other)).max())


def _ahead(device: torch.device) -> str:
    """Return how long the host takes for steps that the device works on for much longer."""
    model, heavy = _model(device), torch.randn(4096, 4096, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    value = torch.randn(1, 8, 384, device=device)
    with tt.watch(model, None, ["*:output"], sinks=[_Dropped()]) as watch:
        watch.follow(optimizer)
        _train(model, optimizer, value, _WARM)
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        for _ in range(40):
            heavy @ heavy
        _train(model, optimizer, value, 2)
        host = time.perf_counter() - began
        torch.accelerator.synchronize(device)
        whole = time.perf_counter() - began
    verdict = "it does not wait" if host < 0.8 * whole else "undecided"
    return f"host {host * 1e3:.1f} ms of {whole * 1e3:.1f} ms: {verdict}"


if __name__ == "__main__":
    main()
