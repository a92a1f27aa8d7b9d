"""Plain float64 references that the reductions are held against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NAMES = ("count", "mean", "std", "min", "max", "absmax", "l1", "l2", "rms", "zeros", "nans", "infs")


def flat64(values: Sequence[Tensor]) -> Tensor:
    """All values, one after the other, as float64; complex ones by their magnitude."""
    parts = [value.detach() for value in values]
    parts = [
        part.to(torch.complex128).abs() if part.is_complex() else part.to(torch.float64) for part in parts
    ]
    return torch.cat([part.reshape(-1) for part in parts])


def statistics(values: Sequence[Tensor]) -> dict[str, float]:
    """The twelve statistics, each by its definition."""
    whole = flat64(values)
    count = whole.numel()
    x = whole[whole.isfinite()]
    some = x.numel() > 0
    return {
        "count": float(count),
        "mean": x.mean().item() if some else math.nan,
        "std": x.std().item() if x.numel() > 1 else math.nan,
        "min": x.min().item() if some else math.nan,
        "max": x.max().item() if some else math.nan,
        "absmax": x.abs().max().item() if some else math.nan,
        "l1": x.abs().sum().item(),
        "l2": x.square().sum().sqrt().item(),
        "rms": x.square().mean().sqrt().item() if some else math.nan,
        "zeros": (whole == 0).double().mean().item() if count else math.nan,
        "nans": float(whole.isnan().sum()),
        "infs": float(whole.isinf().sum()),
    }


def assert_statistics(found: dict[str, float], values: Sequence[Tensor], rtol: float = 1e-6) -> None:
    """Every statistic within ``rtol``; a mean beside zero within ``rtol`` of its own standard error."""
    wanted = statistics(values)
    spread = 0.0 if math.isnan(wanted["std"]) else wanted["std"] / math.sqrt(wanted["count"])
    for name in NAMES:
        one, other = found[name], wanted[name]
        if math.isnan(other) or math.isnan(one):
            assert math.isnan(one) == math.isnan(other), f"{name}: {one} instead of {other}"
            continue
        room = rtol * max(abs(other), spread if name == "mean" else 0.0)
        if name == "std":  # a deviation far below the numbers' own rounding is rounding
            room = max(room, 1e-15 * wanted["absmax"])
        assert abs(one - other) <= room, f"{name}: {one!r} instead of {other!r}"
