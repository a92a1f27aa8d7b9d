"""All statistics of a tensor from one read of its memory, on the device that holds it, in Triton.

The counterpart of ``_native.c``: the same state (`moments.FIELDS`), summed in double precision. A program reads a
stretch of memory a block at a time. Each lane keeps sums of distances from the first finite number that it saw
itself, so no pass over the data is needed to find a center; of n numbers in a lane, rounding in the squares grows at
most n-fold, which for the n there are is nothing. Lanes, and then programs, are joined by their means and squares.
It guarantees:
- nothing waits for the device: one launch for a small value, two for any other;
- no sum of finite numbers overflows where their mean does not: everything is scaled down before it is added.

Not as far as the native kernel goes: squares of float64 beyond 1e157 overflow, and int64 beyond 2**53 is rounded.

Importing this file imports Triton; `device_kernel` does so when there is a value for it. It was run in Triton's
interpreter and compiled for several GPUs, but not run on one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtap.reduce.moments import WIDTH

__all__ = ["measure"]

_BLOCK = 1024
# Triton's defaults for these change between its versions.
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
_LEAST_TILES = 4  # blocks that a program reads at least, so that few programs serve small values
_MOST_PROGRAMS = 1024  # as many as one program can join, and enough to fill a GPU

# Compared in float32, which loses nothing: on many GPUs double precision is what takes longest.
_SHORT = frozenset({torch.float32, torch.float16, torch.bfloat16})

SCALE: tl.constexpr = tl.constexpr(2.0**-10)
FIELDS: tl.constexpr = tl.constexpr(WIDTH)


def measure(state: Tensor, value: Tensor) -> None:
    """Write the state of ``value``, a dense tensor of a dtype in `kernel.DTYPE_CODES`, to ``state`` (float64)."""
    memory = _as_it_lies(value)
    count = memory.numel()
    options = {"COMPARED": tl.float32 if value.dtype in _SHORT else tl.float64, "BLOCK": _BLOCK, **_OPTIONS}
    tiles = max(_LEAST_TILES, -(-count // (_BLOCK * _MOST_PROGRAMS)))
    programs = max(1, -(-count // (_BLOCK * tiles)))
    if programs == 1:
        _read[1,](memory, state, count, tiles, **options)
        return
    parts = torch.empty(programs, WIDTH, dtype=torch.float64, device=value.device)
    _read[programs,](memory, parts, count, tiles, **options)
    _join[1,](parts, state, programs, BLOCK=_MOST_PROGRAMS, **_OPTIONS)


def _as_it_lies(value: Tensor) -> Tensor:
    """All elements in one stretch of memory, in any order; a copy only where there are gaps or repeats."""
    if not value.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(value):
        value = value.contiguous()
    return value.view(torch.uint8) if value.dtype is torch.bool else value


@triton.jit(do_not_specialize=["count", "tiles"])
def _read(memory, states, count, tiles, COMPARED: tl.constexpr, BLOCK: tl.constexpr):
    """The state of each program's stretch of ``tiles`` blocks."""
    program = tl.program_id(0).to(tl.int64)
    start = program * tiles * BLOCK
    end = tl.minimum(start + tiles * BLOCK, count)
    lanes = tl.arange(0, BLOCK)
    finite = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    zeros = tl.zeros([BLOCK], tl.int32)
    center = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    l1 = tl.zeros([BLOCK], tl.float64)
    low = tl.full([BLOCK], float("inf"), COMPARED)
    high = tl.full([BLOCK], float("-inf"), COMPARED)
    for at in range(start, end, BLOCK):
        inside = at + lanes < end
        number = tl.load(memory + at + lanes, mask=inside, other=0).to(COMPARED)
        known = inside & (tl.abs(number) < float("inf"))
        scaled = number.to(tl.float64) * SCALE
        center = tl.where(known & (finite == 0), scaled, center)
        distance = tl.where(known, scaled - center, 0.0)
        total += distance
        squares += distance * distance
        l1 += tl.where(known, tl.abs(number), 0.0).to(tl.float64)
        low = tl.minimum(low, tl.where(known, number, float("inf")))
        high = tl.maximum(high, tl.where(known, number, float("-inf")))
        finite += known.to(tl.int32)
        nans += (number != number).to(tl.int32)
        zeros += (inside & (number == 0)).to(tl.int32)
    some = tl.maximum(finite, 1).to(tl.float64)
    drift = total / some
    read = (end - start).to(tl.float64)
    strange = tl.sum(nans.to(tl.float64), 0)
    _store(
        states + program * FIELDS,
        read,
        strange,
        read - strange - tl.sum(finite.to(tl.float64), 0),
        tl.sum(zeros.to(tl.float64), 0),
        finite.to(tl.float64),
        center,
        drift,
        _not_negative(squares - drift * total),
        low.to(tl.float64),
        high.to(tl.float64),
        l1,
    )


@triton.jit(do_not_specialize=["count"])
def _join(parts, state, count, BLOCK: tl.constexpr):
    """One state out of up to BLOCK."""
    lanes = tl.arange(0, BLOCK)
    inside = lanes < count
    part = parts + lanes * FIELDS
    seen = tl.load(part, mask=inside, other=0.0)
    nans = tl.load(part + 1, mask=inside, other=0.0)
    infs = tl.load(part + 2, mask=inside, other=0.0)
    zeros = tl.load(part + 3, mask=inside, other=0.0)
    _store(
        state,
        tl.sum(seen, 0),
        tl.sum(nans, 0),
        tl.sum(infs, 0),
        tl.sum(zeros, 0),
        seen - nans - infs,
        tl.load(part + 4, mask=inside, other=0.0) * SCALE,
        tl.load(part + 9, mask=inside, other=0.0) * SCALE,
        _squares_of(tl.load(part + 5, mask=inside, other=0.0) * SCALE, seen - nans - infs),
        tl.load(part + 6, mask=inside, other=float("inf")),
        tl.load(part + 7, mask=inside, other=float("-inf")),
        tl.load(part + 8, mask=inside, other=0.0),
    )


@triton.jit
def _store(state, seen, nans, infs, zeros, finite, mean, rest, squares, low, high, l1):
    """Join what the lanes know of their finite numbers, means in two parts and squares scaled, and write the whole."""
    lowest = tl.min(low, 0)
    highest = tl.max(high, 0)
    share = finite / tl.maximum(tl.sum(finite, 0), 1.0)
    middle = tl.sum(share * mean, 0)
    # A constant is its own mean, to the last bit.
    middle = tl.where(lowest == highest, lowest * SCALE, middle)
    distance = tl.where(finite > 0, (mean - middle) + rest, 0.0)
    drift = tl.sum(share * distance, 0)  # what rounding left in the first estimate
    spread = tl.sum(squares + finite * distance * distance, 0) - tl.sum(finite, 0) * drift * drift
    spread = _not_negative(spread) / tl.maximum(tl.sum(finite, 0), 1.0)
    whole = middle + drift
    tl.store(state, seen)
    tl.store(state + 1, nans)
    tl.store(state + 2, infs)
    tl.store(state + 3, zeros)
    tl.store(state + 4, whole / SCALE)
    tl.store(state + 5, tl.sqrt(spread) / SCALE)
    tl.store(state + 6, lowest)
    tl.store(state + 7, highest)
    tl.store(state + 8, tl.sum(l1, 0))
    tl.store(state + 9, ((middle - whole) + drift) / SCALE)


@triton.jit
def _squares_of(deviation, count):
    return deviation * deviation * count


@triton.jit
def _not_negative(squares):
    """A sum of squares that rounding may have left below zero, or overflow without a value."""
    return tl.where(squares != squares, float("inf"), tl.maximum(squares, 0.0))
