"""The merged record of many ranks beside the record of one process on the joined batch."""

from __future__ import annotations

import numpy as np
import torch

import torchtap as tt

STATISTICS = (
    "count",
    "mean",
    "std",
    "min",
    "max",
    "absmax",
    "l1",
    "l2",
    "rms",
    "zeros",
    "nans",
    "infs",
    "p50",
    "p99",
)


def differences(
    world: tt.Run,
    alone: tt.Run,
    *,
    own_loss: int = 1,
    relative: float = 1e-6,
    tensors: float = 1e-12,
    skip: tuple[str, ...] = (),
) -> list[str]:
    """What is not the same, in sentences. Gradients of values are of a rank's ``own_loss``, so many times larger."""
    found = []
    if missing := {site for site in set(alone.sites()) - set(world.sites()) if not _among(site, skip)}:
        found.append(f"missing: {sorted(missing)}")
    for site in alone.sites():
        if site in world.sites() and not _among(site, skip):
            found += _numbers(world, alone, site, relative, own_loss if ":grad_" in site else 1)
            found += _tensors(world, alone, site, tensors)
    return found


def unknown(world: tt.Run) -> list[str]:
    """The sites whose placement nobody knows."""
    placed = {site: world.placement(site) for site in world.sites()}
    return [site for site, placement in placed.items() if placement is None or not placement.known]


def _among(site: str, parts: tuple[str, ...]) -> bool:
    return any(part in site for part in parts)


def _numbers(world: tt.Run, alone: tt.Run, site: str, relative: float, factor: int) -> list[str]:
    found = []
    for statistic in STATISTICS:
        if statistic not in alone.statistics(site):
            continue
        ours, theirs = world.series(site, statistic), alone.series(site, statistic)
        if ours.steps.tolist() != theirs.steps.tolist():
            found.append(f"{site} {statistic}: steps {ours.steps} beside {theirs.steps}")
            continue
        times = 1 if statistic in ("count", "zeros", "nans", "infs", "p50", "p99") else factor
        # A mean of numbers that cancel is as exact as their size allows.
        scale = alone.series(site, "rms").values if statistic == "mean" else np.zeros(len(theirs.values))
        near = np.isclose(ours.values, times * theirs.values, rtol=relative, atol=0, equal_nan=True)
        near |= np.abs(ours.values - times * theirs.values) <= relative * scale
        if not near.all():
            found.append(f"{site} {statistic}: {ours.values} beside {theirs.values}")
    return found


def _tensors(world: tt.Run, alone: tt.Run, site: str, tolerance: float) -> list[str]:
    found = []
    for ref in alone.tensors(site):
        if ref.field == "counts":
            ours, theirs = world.histogram(site, ref.step), alone.histogram(site, ref.step)
            if not np.array_equal(ours.counts, theirs.counts):
                found.append(f"{site}: histogram at step {ref.step}")
        elif ref.field == "value" and ref.reduction == "full":
            one, other = world.tensor(site, ref.step), alone.tensor(site, ref.step)
            if one.shape != other.shape:
                found.append(f"{site}: shape {list(one.shape)} beside {list(other.shape)} at step {ref.step}")
            elif not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
                found.append(f"{site}: tensor at step {ref.step} by {(one - other).abs().max()}")
    return found
