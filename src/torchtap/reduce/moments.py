"""What is known of a stream of numbers after one pass: the state behind every statistic, and its arithmetic.

A state is ``WIDTH`` float64 numbers in the order of ``FIELDS``; ``mean`` and ``squares`` (the sum of squared
distances from the mean) are of the finite values. Everything else that is reported follows from these. It
guarantees:
- merging is exact up to float64 rounding, in any grouping, also with states that have seen nothing;
- ``measure_with_torch`` never waits for a device: its answer is a tensor where the value is.

Not here: the native kernel (`kernel`), buffers of many states (`stats_block`), unusual tensors (`readable`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "FIELDS",
    "STATISTICS",
    "WIDTH",
    "blank_states",
    "finish",
    "measure_masked",
    "measure_with_torch",
    "merge_states",
]

STATISTICS = ("count", "mean", "std", "min", "max", "absmax", "l1", "l2", "rms", "zeros", "nans", "infs")
FIELDS = ("count", "nans", "infs", "zeros", "mean", "squares", "min", "max", "l1")
WIDTH = len(FIELDS)

# Bounds the temporary memory of the torch path: about ten arrays of this many float64.
_CHUNK = 1 << 22
_CHUNK_CPU = 1 << 17  # what caches hold, too

States = npt.NDArray[np.float64]


def blank_states(rows: int) -> States:
    """States that have seen nothing."""
    states = np.zeros((rows, WIDTH))
    states[:, 6] = np.inf
    states[:, 7] = -np.inf
    return states


def finish(states: States) -> States:
    """The twelve statistics of each state, in the order of ``STATISTICS``."""
    count, nans, infs, zeros, mean, squares, low, high, l1 = states.T
    finite = count - nans - infs
    out = np.empty((len(states), len(STATISTICS)))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        nothing = np.where(finite > 0, 0.0, np.nan)  # added to what has no meaning without finite values
        total = squares + finite * mean * mean
        out[:, 0] = count
        out[:, 1] = mean + nothing
        out[:, 2] = np.sqrt(np.where(finite > 1, squares, np.nan) / (finite - 1))
        out[:, 3] = low + nothing
        out[:, 4] = high + nothing
        out[:, 5] = np.maximum(-low, high) + nothing
        out[:, 6] = l1
        out[:, 7] = np.sqrt(total)
        out[:, 8] = np.sqrt(total / finite)
        out[:, 9] = zeros / count
        out[:, 10] = nans
        out[:, 11] = infs
    return out


def merge_states(left: Tensor, right: Tensor) -> Tensor:
    """Combine states (the last dimension is the state), elementwise over any leading dimensions."""
    summed = left + right  # right for count, nans, infs, zeros and l1; the others are replaced below
    count_left = left[..., 0] - left[..., 1] - left[..., 2]
    count_right = right[..., 0] - right[..., 1] - right[..., 2]
    share = count_right / (count_left + count_right).clamp(min=1)
    mean_left, mean_right = left[..., 4], right[..., 4]
    delta = mean_right - mean_left
    mean = mean_left + delta * share
    # Two means of opposite sign near the end of the range: their distance overflows, their average does not.
    mean = torch.where(delta.isfinite(), mean, mean_left * (1 - share) + mean_right * share)
    spread = delta * delta * (count_left * share)
    # Where one side saw nothing finite its mean is no mean, and 0 * inf would be NaN.
    both = (count_left > 0) & (count_right > 0)
    summed[..., 4] = torch.where(both, mean, torch.where(count_left > 0, mean_left, mean_right))
    summed[..., 5] += torch.where(both, spread, torch.zeros_like(spread))
    summed[..., 6] = torch.minimum(left[..., 6], right[..., 6])
    summed[..., 7] = torch.maximum(left[..., 7], right[..., 7])
    return summed


def measure_with_torch(value: Tensor) -> Tensor:
    """The state of one dense real tensor, by torch ops alone, as a tensor on the value's device."""
    wide = torch.float32 if value.device.type == "mps" else torch.float64  # MPS has no float64
    flat = value.detach().reshape(-1)
    if not flat.numel():
        return torch.tensor(blank_states(1)[0], dtype=wide, device=value.device)
    chunks = torch.split(flat, _CHUNK_CPU if value.device.type == "cpu" else _CHUNK)
    states = torch.stack([_measure_chunk(chunk.to(wide)) for chunk in chunks])
    while len(states) > 1:
        half = len(states) // 2
        merged = merge_states(states[:half], states[half : 2 * half])
        states = torch.cat([merged, states[2 * half :]])
    return states[0]


def _measure_chunk(chunk: Tensor) -> Tensor:
    # Looking whether all is finite would mean waiting for another device, but not for the CPU, where it saves most.
    if chunk.device.type == "cpu":
        l1 = chunk.abs().sum().item()
        if math.isfinite(l1):
            return _measure_finite(chunk, l1)
    return measure_masked(chunk)


def _measure_finite(chunk: Tensor, l1: float) -> Tensor:
    low, high = (end.item() for end in chunk.aminmax())
    count = chunk.numel()
    mean, squares = low, 0.0
    if low < high:
        center = chunk.sum().item() / count
        distance = chunk - center
        drift = distance.sum().item() / count  # what rounding left in the first estimate
        mean = center + drift
        squares = max(torch.dot(distance, distance).item() - count * drift * drift, 0.0)
    zeros = count - int(chunk.count_nonzero()) if low <= 0 <= high else 0
    return torch.tensor([count, 0, 0, zeros, mean, squares, low, high, l1], dtype=chunk.dtype)


def measure_masked(chunk: Tensor) -> Tensor:
    """The state of a flat tensor of the wide dtype that has elements, without a look at it: a compiler can fuse it."""
    finite = chunk.isfinite()
    count = finite.sum().to(chunk.dtype)
    some = count.clamp(min=1)
    nans = chunk.isnan().sum()
    zero = torch.zeros((), dtype=chunk.dtype, device=chunk.device)
    safe = torch.where(finite, chunk, zero)
    low = torch.where(finite, chunk, torch.inf).amin()
    high = torch.where(finite, chunk, -torch.inf).amax()
    # Halved, because a sum of finite values may overflow where their mean does not.
    center = (safe * 2.0**-22).sum() / some * 2.0**22
    center = torch.where(low == high, low, center)
    distance = torch.where(finite, chunk - center, zero)
    drift = distance.sum() / some  # what rounding left in the first estimate
    squares = (distance * distance).sum() - some * drift * drift
    mean = torch.where(drift.isfinite(), center + drift, center)
    squares = torch.where(squares.isnan(), torch.inf, squares.clamp(min=0))
    zeros = (chunk == 0).sum()
    infs = chunk.numel() - count - nans
    total = torch.full_like(count, chunk.numel())
    fields = (total, nans, infs, zeros, mean, squares, low, high, safe.abs().sum())
    return torch.stack([field.to(chunk.dtype) for field in fields])
