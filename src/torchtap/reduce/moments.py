"""The state behind every statistic: ten numbers about a stream of numbers, and their arithmetic.

A state is ``WIDTH`` float64 numbers in the order of ``FIELDS``. ``deviation`` is the root of the mean squared distance
of the finite values from their mean, and ``mean + rest`` is the mean to twice the digits of one number. So states merge
without loss, also if the mean is far above the spread or near the ends of the range. It guarantees:
- merging is exact up to float64 rounding, in any grouping, also with empty states;
- ``measure_with_torch`` never waits for a device: it returns a tensor on the value's device.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    "merged_results",
]

STATISTICS = ("count", "mean", "std", "min", "max", "absmax", "l1", "l2", "rms", "zeros", "nans", "infs")
FIELDS = ("count", "nans", "infs", "zeros", "mean", "deviation", "min", "max", "l1", "rest")
WIDTH = len(FIELDS)

# Bounds the temporary memory of the torch path: about ten arrays of this many float64.
_CHUNK = 1 << 22
_CHUNK_CPU = 1 << 17  # fits into caches

_COUNTED = 1 << 53  # float64 has every integer up to here
_LARGEST = torch.iinfo(torch.int64).max
# Above which size squares overflow, and the factor that prevents it; below which they vanish, and the factor.
_SCALES = {
    torch.float64: (2.0**480, 2.0**-540, 2.0**-400, 2.0**500),
    torch.float32: (2.0**50, 2.0**-80, 2.0**-40, 2.0**60),
}

States = npt.NDArray[np.float64]


def blank_states(rows: int) -> States:
    """Return states of no values."""
    states = np.zeros((rows, WIDTH))
    states[:, 6] = np.inf
    states[:, 7] = -np.inf
    return states


def finish(states: States) -> States:
    """Return the twelve statistics of each state, in the order of ``STATISTICS``."""
    count, nans, infs, zeros, mean, deviation, low, high, l1, _ = states.T
    finite = count - nans - infs
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        nothing = np.where(finite > 0, 0.0, np.nan)  # makes NaN of what is undefined without finite values
        rms = np.hypot(deviation, mean) + nothing
        std = deviation * np.sqrt(np.where(finite > 1, finite, np.nan) / (finite - 1))
        absmax = np.maximum(-low, high) + nothing
        l2 = np.where(finite > 0, rms * np.sqrt(finite), 0.0)
        columns = (
            count,
            mean + nothing,
            std,
            low + nothing,
            high + nothing,
            absmax,
            l1,
            l2,
            rms,
            zeros / count,
        )
        return np.stack((*columns, nans, infs), axis=1)


def merge_states(left: Tensor, right: Tensor) -> Tensor:
    """Combine states (the last dimension), elementwise over any leading dimensions."""
    summed = left + right  # correct for count, nans, infs, zeros and l1; the others are replaced below
    count_left = left[..., 0] - left[..., 1] - left[..., 2]
    count_right = right[..., 0] - right[..., 1] - right[..., 2]
    all_of = (count_left + count_right).clamp(min=1)
    share, keep = count_right / all_of, count_left / all_of
    mean_left, mean_right = left[..., 4], right[..., 4]
    # Halves, because the distance of two means at opposite ends of the range overflows. If one side has no finite
    # value it has no mean, and 0 * inf would be NaN.
    both = (count_left > 0) & (count_right > 0)
    half = (mean_right * 0.5 - mean_left * 0.5) + (right[..., 9] - left[..., 9]) * 0.5
    half = torch.where(both, half, torch.zeros_like(half))
    delta = half * 2
    near = delta.isfinite()
    mean, rest = _sum_of_two(
        torch.where(near, mean_left, mean_left * keep),
        torch.where(near, left[..., 9] + delta * share, mean_right * share),
    )
    deviation = torch.hypot(keep.sqrt() * left[..., 5], share.sqrt() * right[..., 5])
    deviation = torch.hypot(deviation, half * (2 * (keep * share).sqrt()))
    only = torch.where((count_left > 0)[..., None], left, right)
    summed[..., 4] = torch.where(both, mean, only[..., 4])
    summed[..., 5] = torch.where(both, deviation, only[..., 5])
    summed[..., 6] = torch.minimum(left[..., 6], right[..., 6])
    summed[..., 7] = torch.maximum(left[..., 7], right[..., 7])
    summed[..., 9] = torch.where(both, rest, only[..., 9])
    return summed


def merged_results(states: Sequence[States]) -> States:
    """Return the statistics of the rows of several blocks, merged row by row; blocks may have different lengths."""
    longest = max(map(len, states))
    merged = torch.from_numpy(blank_states(longest))
    for each in states:
        padding = blank_states(longest - len(each))
        merged = merge_states(merged, torch.from_numpy(np.concatenate([each, padding])))
    return finish(merged.numpy())


def _sum_of_two(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sum, and what rounding left out of it."""
    total = one + other
    part = total - one
    rest = (one - (total - part)) + (other - part)
    return total, torch.where(rest.isfinite(), rest, torch.zeros_like(rest))


def measure_with_torch(value: Tensor) -> Tensor:
    """Return the state of one dense real tensor, computed by torch ops, on the value's device."""
    wide = torch.float32 if value.device.type == "mps" else torch.float64  # MPS has no float64
    flat = value.detach().reshape(-1)
    if not flat.numel():
        return torch.tensor(blank_states(1)[0], dtype=wide, device=value.device)
    chunks = torch.split(flat, _CHUNK_CPU if value.device.type == "cpu" else _CHUNK)
    states = torch.stack([_measure_chunk(chunk, wide) for chunk in chunks])
    while len(states) > 1:
        half = len(states) // 2
        merged = merge_states(states[:half], states[half : 2 * half])
        states = torch.cat([merged, states[2 * half :]])
    return states[0]


def _measure_chunk(chunk: Tensor, wide: torch.dtype) -> Tensor:
    """Return the state of a flat tensor.

    int64 values near each other but beyond the integers of float64 are measured as distances from the smallest.
    """
    if chunk.dtype is not torch.int64:
        return measure_masked(chunk.to(wide))
    low, high = chunk.aminmax()
    far = (low < -_COUNTED) | (high > _COUNTED)
    near = (high >> 1) - (low >> 1) < _COUNTED // 2
    start = torch.where(far & near, low, torch.zeros_like(low))
    state = measure_masked((chunk - start).to(wide))
    whole = start.to(wide)
    # `whole` may be 2**63, which is no int64.
    left = torch.where(whole < 2.0**63, start - whole.to(torch.int64), start - _LARGEST - 1).to(wide)
    mean, rest = _sum_of_two(whole, state[4])
    mean, rest = _sum_of_two(mean, rest + (left + state[9]))
    moved = state.clone()
    moved[3] = torch.where(start == 0, state[3], torch.zeros_like(whole))
    moved[4], moved[9] = mean, rest
    moved[6], moved[7] = state[6] + whole, state[7] + whole
    moved[8] = torch.where(start == 0, state[8], (whole * chunk.numel() + state[8]).abs())
    return moved


def measure_masked(chunk: Tensor) -> Tensor:
    """Return the state of a flat nonempty tensor of the wide dtype, without reading it, so that a compiler can fuse it.

    It uses comparisons and sums of numbers only: with ``isnan``, ``isfinite`` and sums of truth values Inductor's code
    for the CPU took two to three times as long.
    """
    zero, one = chunk.new_zeros(()), chunk.new_ones(())
    finite = chunk.abs() < torch.inf
    count = torch.where(finite, one, zero).sum()
    some = count.clamp(min=1)
    nans = torch.where(chunk != chunk, one, zero).sum()
    safe = torch.where(finite, chunk, zero)
    low = torch.where(finite, chunk, torch.inf).amin()
    high = torch.where(finite, chunk, -torch.inf).amax()
    large, shrink, small, stretch = _SCALES[chunk.dtype]
    size = torch.maximum(-low, high)
    scale = torch.ones_like(size).masked_fill(size > large, shrink).masked_fill(size < small, stretch)
    # Scaled down, because a sum of finite values may overflow although their mean does not.
    center = (safe * 2.0**-22).sum() / some * 2.0**22
    center = torch.where(low == high, low, center)
    distance = torch.where(finite, chunk * scale - center * scale, zero)
    drift = distance.sum() / some  # what rounding left in the first estimate
    squares = ((distance * distance).sum() - some * drift * drift).clamp(min=0)
    deviation = (squares / some).sqrt() / scale
    mean = center + drift / scale
    rest = (center - mean) + drift / scale
    zeros = torch.where(chunk == 0, one, zero).sum()
    infs = chunk.numel() - count - nans
    total = torch.full_like(count, chunk.numel())
    return torch.stack((total, nans, infs, zeros, mean, deviation, low, high, safe.abs().sum(), rest))
