"""Stats against float64 by definition, over dtypes, shapes, layouts and splits, on both paths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import hypothesis.extra.numpy as numpy_strategies
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reduce.references import assert_statistics, statistics
from torch import Tensor

from torchtap.reduce import Reduction, Result, Stats, kernel
from torchtap.reduce.moments import WIDTH
from torchtap.testing import ReductionContract

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def measured(*values: Tensor) -> dict[str, float]:
    state = None
    for value in values:
        state = Stats().update(state, value)
    assert state is not None
    return Stats().result(state)  # type: ignore[return-value]


@pytest.mark.usefixtures("path")
class TestStats(ReductionContract):
    rtol = 1e-6

    def reduction(self) -> Reduction[Tensor]:
        return Stats()

    def reference(self, values: Sequence[Tensor]) -> Result:
        return dict(statistics(values))


finite = st.floats(-1e4, 1e4, width=16)
numbers = finite | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(numpy_strategies.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
    elements = numbers if dtype.is_floating_point or dtype.is_complex else finite.map(lambda x: x % 100)
    array = draw(numpy_strategies.arrays(np.float32, shape, elements=elements))
    value = torch.from_numpy(array).to(torch.int64 if dtype is torch.uint16 else dtype).to(dtype)
    for _ in range(draw(st.integers(0, 2))):
        if value.dim() > 1:
            value = value.transpose(*draw(st.permutations(range(value.dim())))[:2])
        if value.dim() and value.shape[-1] and value.dtype is not torch.uint16:
            value = value[..., :: draw(st.integers(1, 3))]
        if draw(st.booleans()) and value.dim() and value.shape[0] == 1:
            value = value.expand(3, *value.shape[1:])
    return value


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(tensors(), min_size=1, max_size=4))
def test_any_tensors_give_the_reference_statistics(path: str, values: list[Tensor]) -> None:
    assert_statistics(measured(*values), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 127, 128, 129, 8192, 8193, 70_001])
def test_whole_and_broken_blocks_with_some_strange_values(path: str, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    value = (torch.randn(size, dtype=torch.float64) * 3 + 1).to(dtype)
    assert_statistics(measured(value), [value])
    value[torch.randint(size, (size // 50 + 1,))] = math.inf
    value[torch.randint(size, (size // 50 + 1,))] = math.nan
    value[torch.randint(size, (size // 20 + 1,))] = 0
    assert_statistics(measured(value), [value])


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        (0, 1),
        (100, 1),
        (1e4, 1e-2),
        (1e6, 1),
        (-1e7, 1),
        (1, 1e-6),
        (1e-20, 1e-21),
        (1e-30, 1e-30),
        (1e19, 1e20),
    ],
)
def test_a_mean_far_from_the_spread_costs_no_precision(path: str, mean: float, std: float) -> None:
    torch.manual_seed(0)
    value = (torch.randn(300_007, dtype=torch.float64) * std + mean).float()
    assert_statistics(measured(value), [value])
    precise = torch.randn(100_003, dtype=torch.float64) * std + mean
    assert_statistics(measured(precise), [precise], rtol=1e-8)


def test_values_whose_mean_jumps_from_block_to_block(path: str) -> None:
    torch.manual_seed(0)
    levels = torch.tensor([0.0, 1e8, -3.0, 1e-12, 5e4]).repeat_interleave(8192)
    value = levels + levels * torch.randn(len(levels)) * 1e-3
    assert_statistics(measured(value), [value])


def test_an_outlier_in_front_costs_no_precision(path: str) -> None:
    torch.manual_seed(0)
    value = torch.randn(40_000)
    value[0] = 1e9
    assert_statistics(measured(value), [value])


def test_a_constant_has_no_spread(path: str) -> None:
    for constant in (0.1, 1e30, -3e-30, 1e-45):
        result = measured(torch.full((10_000,), constant))
        assert result["std"] == 0
        assert result["mean"] == torch.tensor(constant).item()


def test_numbers_at_the_ends_of_the_range(path: str) -> None:
    big = torch.finfo(torch.float32).max
    value = torch.tensor([big, -big, big, big / 2] * 100)
    assert_statistics(measured(value), [value])
    wide = torch.tensor([1.7e308, 1.6e308] * 2000, dtype=torch.float64)
    result = measured(wide)
    assert result["mean"] == pytest.approx(1.65e308)
    assert result["l1"] == math.inf
    assert result["max"] == 1.7e308
    high = torch.full((9000,), 1.7e308, dtype=torch.float64)
    for opposite in (measured(high, -high), measured(torch.cat([high, -high]))):
        assert abs(opposite["mean"]) < 1e300
        if path != "triton":  # it squares in float64 as it is: its docstring says so
            assert opposite["std"] == pytest.approx(1.7e308, rel=1e-3)
        assert opposite["infs"] == 0


def test_a_hundred_million_elements_stay_exact(path: str) -> None:
    torch.manual_seed(0)
    block = torch.randint(-3, 120, (1_000_000,), dtype=torch.int8)
    value = block.repeat(100)
    one = statistics([block])
    result = measured(value)
    assert result["count"] == 1e8
    assert result["mean"] == pytest.approx(one["mean"], rel=1e-12)
    assert result["std"] == pytest.approx(
        one["std"] * math.sqrt((1e6 - 1) / 1e6 / ((1e8 - 1) / 1e8)), rel=1e-9
    )
    assert result["l1"] == one["l1"] * 100
    assert result["l2"] == pytest.approx(one["l2"] * 10, rel=1e-12)
    assert result["zeros"] == pytest.approx(one["zeros"])


def test_int64_beyond_what_float64_counts(path: str) -> None:
    value = torch.tensor([2**62, -(2**62), 2**61 + 1, 7])
    assert_statistics(measured(value), [value])


@pytest.mark.skipif(kernel.native is None, reason="the native kernel is not built here")
class TestNativeKernel:
    def test_the_number_of_threads_does_not_change_a_bit(self) -> None:
        torch.manual_seed(0)
        value = torch.randn(5_000_011)
        states = torch.empty(4, WIDTH, dtype=torch.float64)
        assert kernel.native is not None
        for row, threads in enumerate((1, 2, 3, 200)):
            kernel.native.measure(states[row].data_ptr(), value.data_ptr(), value.numel(), 0, threads)
        assert all(torch.equal(states[0], states[row]) for row in range(1, 4))

    @pytest.mark.parametrize("instructions", ["plain", "avx2", "best"])
    def test_every_instruction_set_gives_the_reference(self, instructions: str) -> None:
        assert kernel.native is not None
        torch.manual_seed(0)
        try:
            kernel.native.use_instructions(instructions)
            for dtype in kernel.DTYPE_CODES:
                value = (torch.randn(20_011) * 30).to(dtype)
                assert_statistics(measured(value), [value])
            halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
            assert_statistics(measured(halves), [halves])
        finally:
            kernel.native.use_instructions("best")

    def test_a_permuted_or_sliced_layout_is_read_as_it_lies(self) -> None:
        torch.manual_seed(0)
        base = torch.randn(7, 5, 33, 41)
        views = [
            base.permute(2, 0, 3, 1),
            base.to(memory_format=torch.channels_last),
            base[:, :, 3:, :-2],
            base[::2, 1:4, ::3, ::5],
            base.permute(3, 1, 0, 2)[1:, :, ::2],
            base[:1, :1].expand(6, 4, 33, 41),
            base.unfold(3, 5, 2),
            torch.ones(()).expand(1000, 1000),
            base.view(35, -1)[:, :1200],
        ]
        for view in views:
            assert_statistics(measured(view), [view])

    def test_wrong_arguments_are_refused(self) -> None:
        assert kernel.native is not None
        with pytest.raises(TypeError):
            kernel.native.measure(0)
        with pytest.raises(ValueError, match="dtype"):
            kernel.native.measure(0, 0, 0, 99, 1)
        with pytest.raises(TypeError):
            kernel.native.fold("row", 0)
