"""What docs/reductions.md promises of the statistics' digits, against exact arithmetic, where it is hardest to keep."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from torchtap.reduce import Stats, kernel


def exactly(values: Sequence[float | int]) -> tuple[Fraction, float, float]:
    """The mean, the standard deviation and the norm, from exact sums."""
    numbers = [Fraction(value) for value in values]
    mean = sum(numbers) / len(numbers)
    variance = sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
    return mean, _root(variance), _root(sum(number * number for number in numbers))


def _root(square: Fraction) -> float:
    if square == 0:
        return 0.0
    shift = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(float(square / Fraction(4) ** shift)), shift)


def measured(*values: Tensor) -> dict[str, float]:
    state = None
    for value in values:
        state = Stats().update(state, value)
    assert state is not None
    return Stats().result(state)  # type: ignore[return-value]


@pytest.mark.parametrize("ratio", [1.0, 1e6, 1e12, 1e14])
@pytest.mark.parametrize("parts", [1, 7])
def test_a_mean_far_above_the_spread_costs_no_digits(path: str, ratio: float, parts: int) -> None:
    torch.manual_seed(0)
    value = torch.randn(20_011, dtype=torch.float64) + ratio
    pieces = list(value.split(20_011 // parts))
    random.Random(1).shuffle(pieces)
    mean, std, _ = exactly(value.tolist())
    found = measured(*pieces)
    assert found["mean"] == pytest.approx(float(mean), rel=1e-15)
    assert found["std"] == pytest.approx(std, rel=1e-9)


@pytest.mark.parametrize("order", range(3))
def test_states_merge_to_the_same_in_any_order(path: str, order: int) -> None:
    torch.manual_seed(0)
    pieces = [torch.randn(500, dtype=torch.float64) * 10.0**k + 1e13 for k in range(-2, 3)]
    _, std, _ = exactly(torch.cat(pieces).tolist())
    states = [Stats().update(None, piece) for piece in pieces]
    shuffled = random.Random(order)
    while len(states) > 1:
        shuffled.shuffle(states)
        states.append(Stats().merge(states.pop(), states.pop()))
    assert Stats().result(states[0])["std"] == pytest.approx(std, rel=1e-9)


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e-170, 1e-150, 1e150, 1e154, 1e200, 1e305])
@pytest.mark.parametrize("count", [5, 1000, 9000])
def test_squares_beyond_float64_neither_overflow_nor_vanish(path: str, size: float, count: int) -> None:
    if path == "triton":
        pytest.skip("squares as they are: its docstring says so")
    torch.manual_seed(0)
    value = torch.randn(count, dtype=torch.float64) * size
    for values in ([value], [value[:3], value[3:]]):
        found = measured(*values)
        _, std, norm = exactly(value.tolist())
        assert found["std"] == pytest.approx(std, rel=1e-9)
        assert found["l2"] == pytest.approx(norm, rel=1e-9)
        assert found["rms"] == pytest.approx(norm / math.sqrt(count), rel=1e-9)
    constant = measured(torch.full((count,), size, dtype=torch.float64))
    assert constant["rms"] == pytest.approx(size, rel=1e-12)
    assert constant["std"] == 0


@pytest.mark.parametrize("start", [2**63 - 3000, -(2**63), 2**53 - 1000, 2**62, -5])
def test_integers_that_float64_does_not_count_have_their_spread(path: str, start: int) -> None:
    if path == "triton":
        pytest.skip("int64 is rounded: its docstring says so")
    numbers = [start + (k * k) % 2999 for k in range(2600)]
    value = torch.tensor(numbers, dtype=torch.int64)
    mean, std, _ = exactly(numbers)
    for values in ([value], [value[:900], value[900:]]):
        found = measured(*values)
        assert found["std"] == pytest.approx(std, rel=1e-9)
        assert found["mean"] == pytest.approx(float(mean), rel=1e-15)
        assert found["l1"] == pytest.approx(float(sum(map(abs, numbers))), rel=1e-12)
        assert (found["min"], found["max"]) == (float(min(numbers)), float(max(numbers)))
    assert measured(torch.tensor([2**63 - 1, 2**63 - 3, 2**63 - 5]))["std"] == pytest.approx(2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_numbers_that_cancel_leave_a_mean_within_what_is_promised(
    path: str, dtype: torch.dtype
) -> None:
    large = 2.0**24 if dtype is torch.float32 else 2.0**12
    value = torch.tensor([large, 1.0, -large, 1.0]).repeat_interleave(16).repeat(2000).to(dtype)
    found = measured(value)
    assert abs(found["mean"] - 0.5) <= 1e-6 * found["rms"]
    double = measured(value.double())
    assert double["mean"] == pytest.approx(0.5, rel=1e-9)


@pytest.fixture(params=["best", "plain"])
def flushing(request: pytest.FixtureRequest) -> Iterator[None]:
    """The processor is told to take small numbers for zero."""
    if kernel.native is None or not torch.set_flush_denormal(True):
        pytest.skip("no native kernel, or a processor that cannot flush")
    kernel.native.use_instructions(request.param)
    yield
    kernel.native.use_instructions("best")
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("size", [1, 7, 8, 9, 131, 4099])
def test_flushing_small_numbers_to_zero_does_not_reach_the_statistics(size: int) -> None:
    halves = torch.full((size,), 3, dtype=torch.int16).view(torch.float16)  # 3 * 2**-24
    singles = torch.full((size,), 5, dtype=torch.int32).view(torch.float32)  # 5 * 2**-149
    for value, number in ((halves, 3 * 2.0**-24), (singles, 5 * 2.0**-149)):
        found = measured(value)
        assert found["zeros"] == 0
        assert found["min"] == found["max"] == found["mean"] == number
        assert found["l1"] == pytest.approx(number * size)
    assert torch.tensor([1e-310], dtype=torch.float64).mul(1).item() == 0  # and torch still flushes


SMALL = [1e-38, 1e-37, 1e-30, 1e-24, 1e-19, 1e-15, 1e-13, 1e-11]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((size, torch.float32) for size in (1e-44, 1e-41, *SMALL)),
        *((size, torch.bfloat16) for size in SMALL),
    ],
)
def test_gradients_that_vanish_cost_no_digits(path: str, size: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    value = (torch.randn(20_480, dtype=torch.float64) * size).to(dtype)  # the last block is not a whole one
    value[::7] = 0
    found = measured(value)
    x = value.double()
    assert found["zeros"] == (x == 0).double().mean()
    assert (found["min"], found["max"]) == (x.min(), x.max())
    mean, std, norm = exactly(x.tolist())
    error = abs(found["mean"] - float(mean)) / (std / math.sqrt(len(x)))
    assert error < 1e-6
    assert found["std"] == pytest.approx(std, rel=1e-6, abs=0)
    assert found["l2"] == pytest.approx(norm, rel=1e-6, abs=0)
    assert found["l1"] == pytest.approx(x.abs().sum().item(), rel=1e-6, abs=0)


def test_a_large_number_among_vanishing_ones_is_seen(path: str) -> None:
    block = 8192
    for odd in (1.0, 1e30, math.inf, math.nan):
        value = torch.full((3 * block,), 1e-25)
        value[::2] = -3e-25
        value[2 * block + 5] = odd
        found = measured(value)
        x = value.double()
        finite = x[x.isfinite()]
        assert (found["nans"], found["infs"]) == (x.isnan().sum(), x.isinf().sum())
        assert found["max"] == finite.max()
        assert found["l2"] == pytest.approx(finite.square().sum().sqrt().item(), rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_are_counted_wherever_they_begin_and_end(path: str, dtype: torch.dtype) -> None:
    block = 8192
    torch.manual_seed(0)
    for begin, end in (
        (0, 3),
        (5, block),
        (block + 7, 2 * block + 9),
        (3 * block - 1, 4 * block),
        (0, 4 * block),
    ):
        value = torch.randn(4 * block + 37).abs().add(0.5).to(dtype)
        value[begin:end] = 0
        value[begin:end:3] *= -1  # zeros with a sign are zeros, too
        found, x = measured(value), value.double()
        assert found["zeros"] == (end - begin) / len(value)
        assert (found["min"], found["max"]) == (0, x.max())
        _, std, norm = exactly(x.tolist())
        assert found["std"] == pytest.approx(std, rel=1e-6)
        assert found["l2"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_whose_size_changes_from_block_to_block_cost_no_digits(path: str, dtype: torch.dtype) -> None:
    block = 8192
    torch.manual_seed(0)
    for sizes in ((1.0, 1e-25, 1e-12), (1e-30, 1.0, 1e-38), (1e-17, 1e-33, 1e-15), (1e-25, 1e12, 1e-25)):
        value = torch.cat([torch.randn(block, dtype=torch.float64) * size for size in sizes]).to(dtype)
        for part in (*value.split(block), value, value.clamp(min=0)):
            found, x = measured(part), part.double()
            mean, std, norm = exactly(x.tolist())
            assert abs(found["mean"] - float(mean)) <= 1e-6 * std
            assert found["std"] == pytest.approx(std, rel=1e-6, abs=0)
            assert found["l2"] == pytest.approx(norm, rel=1e-6, abs=0)
            assert found["zeros"] == (x == 0).double().mean()
