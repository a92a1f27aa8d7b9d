"""Norms of rows: the kernel against plain torch in double precision, and torch's way against the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchtap.reduce import row_norms
from torchtap.reduce.row_norms import of_change, of_steps, read, row_count

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = st.lists(st.integers(0, 5), max_size=2).flatmap(
    lambda rows: st.integers(0, 2100).map(lambda width: (*rows, width))
)


@pytest.fixture(params=["torch", "plain", "avx2", "best"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test with every instruction set that was built, and as if the kernel had not been."""
    native = row_norms.native
    if request.param == "torch":
        monkeypatch.setattr(row_norms, "native", None)
        yield "torch"
        return
    if native is None:
        pytest.skip("the native kernel is not built here")
    native.use_instructions(request.param)
    yield str(request.param)
    native.use_instructions("best")


def sums(*values: Tensor) -> list[float]:
    return [torch.linalg.vector_norm(value.double(), dim=-1).sum().item() for value in values]


def numbers(found: row_norms.RowNorms) -> list[float]:
    return list(read([found])[0])


def held(found: row_norms.RowNorms, expected: list[float]) -> None:
    assert numbers(found) == pytest.approx(expected, rel=2e-6, abs=1e-300, nan_ok=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=SHAPES, seed=st.integers(0, 2**16), scale=st.sampled_from([1.0, 1e-3, 30.0]))
def test_every_sum_is_that_of_the_definition(
    way: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    value, between, start = ((torch.randn(shape, generator=generator) * scale).to(dtype) for _ in range(3))
    bias, start_bias = ((torch.randn(shape[-1], generator=generator) * scale).to(dtype) for _ in range(2))
    v, b, s, p, q = (each.double() for each in (value, between, start, bias, start_bias))
    held(of_change(value, start), sums(v, v - s))
    held(of_steps(value, between, start), sums(v - b, b - s, v, s))
    held(
        of_steps(value, between, start, (bias, start_bias)),
        sums(v - b, b - s, v - p, s - q, (v - p) - (b - q)),
    )
    assert row_count(value) == math.prod(shape[:-1])


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_comes_out_as_torch_has_it(way: str, dtype: torch.dtype, odd: float) -> None:
    value, between, start = (torch.randn(4, 40).to(dtype) for _ in range(3))
    for place in (value, between):
        place[1, 17] = odd
    v, b, s = (each.double() for each in (value, between, start))
    held(of_steps(value, between, start), sums(v - b, b - s, v, s))
    held(of_change(value, start), sums(v, v - s))


@pytest.mark.parametrize("scale", [1e-25, 1e-38, 1e25])
def test_squares_that_float_cannot_hold_are_not_lost(scale: float) -> None:
    if row_norms.native is None:
        pytest.skip("torch itself loses them")
    value, between = torch.randn(3, 50) * scale, torch.randn(3, 50) * scale
    v, b = value.double(), between.double()
    held(of_change(value, between), sums(v, v - b))
    held(of_steps(value, between, between), sums(v - b, b - b, v, b))


def test_a_difference_of_equal_values_is_exactly_nothing(way: str) -> None:
    value, bias = torch.randn(5, 33), torch.randn(33)
    same = value.clone()
    assert numbers(of_change(value, same))[1] == 0
    near, far, _, _, bare = numbers(of_steps(value, same, value, (bias, bias.clone())))
    assert near == far == bare == 0


def test_norms_of_sixteen_bits_neither_overflow_nor_round(way: str) -> None:
    value = torch.full((2, 64), 3000.0, dtype=torch.float16)
    assert numbers(of_change(value, torch.zeros_like(value)))[0] == pytest.approx(2 * 3000 * 8, rel=1e-9)


needs_rows_into = pytest.mark.skipif(
    row_norms.rows_into is row_norms._nothing_done, reason="tensors do not tell native code where they lie"
)


def into(cut: bool, *values: object) -> tuple[int, list[float], list[float]]:
    """What was done, and the numbers of the output and of the input; -1 where nothing was written."""
    cells = torch.full((2, row_norms.CELLS), -1.0, dtype=torch.float64)
    done = row_norms.rows_into(cells.data_ptr(), cut, *values)
    return done, *cells.tolist()


@needs_rows_into
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 40), (600, 1024)], ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_tensors_go_into_cells_as_they_are(dtype: torch.dtype, shape: tuple[int, ...], cut: bool) -> None:
    longer = (shape[0] + 3 * cut, *shape[1:])
    given, output = (torch.randn(longer).to(dtype) for _ in range(2))
    start_given, between, start = (torch.randn(shape).to(dtype) for _ in range(3))
    biases = [torch.nn.Parameter(torch.randn(shape[-1]).to(dtype)) for _ in range(2)]
    x, y, x_0, b, s, p, q = (
        each.detach().double()
        for each in (given[: shape[0]], output[: shape[0]], start_given, between, start, *biases)
    )
    rows, width = float(math.prod(shape[:-1])), float(shape[-1])
    done, of_output, of_input = into(cut, given, start_given, output, between, start)
    assert done == 3
    assert of_input[:2] == of_output[:2] == [rows, width]
    assert of_output[2:6] == pytest.approx(sums(y - b, b - s, y, s), rel=2e-6)
    assert of_input[2:4] == pytest.approx(sums(x, x - x_0), rel=2e-6)
    done, of_output, _ = into(cut, given, start_given, output, between, start, *biases)
    assert done == 3
    assert of_output[2:] == pytest.approx(sums(y - b, b - s, y - p, s - q, (y - p) - (b - q)), rel=2e-6)
    # A value that stands twice is found once.
    assert into(cut, given, start_given, output, output, start)[1][2:4] == pytest.approx(
        sums(y - y, y - s), rel=2e-6
    )


def freed() -> Tensor:
    value = torch.ones(3, 4)
    value.untyped_storage().resize_(0)
    return value


UNLIKE = {
    "other sizes": torch.ones(4, 3),
    "other dimensions": torch.ones(1, 3, 4),
    "more columns": torch.ones(3, 5),
    "fewer rows": torch.ones(2, 4),
    "other dtypes": torch.ones(3, 4).double(),
    "whole numbers": torch.ones(3, 4).long(),
    "no dimensions": torch.ones(()),
    "no elements": torch.ones(0, 4),
    "gaps": torch.ones(3, 8)[:, ::2],
    "another order": torch.ones(4, 3).t(),
    "expanded": torch.ones(1, 4).expand(3, 4),
    "negated": torch._neg_view(torch.ones(3, 4)),
    "on another device": torch.ones(3, 4, device="meta"),
    "no memory": freed(),
    "no tensor": (torch.ones(3, 4),),
    "nothing": None,
}


@needs_rows_into
@pytest.mark.parametrize("name", UNLIKE)
def test_what_does_not_lie_alike_is_left_and_nothing_is_written(name: str) -> None:
    odd, value = UNLIKE[name], torch.ones(3, 4)
    nothing = [-1.0] * row_norms.CELLS
    for place in range(3):
        values = [value] * 3
        values[place] = odd
        done, of_output, of_input = into(False, value, value, *values)
        assert (done, of_output) == (2, nothing), place
        assert of_input[:2] == [3, 4]
    done, of_output, of_input = into(False, odd, value, value, value, value)
    assert (done, of_input) == (1, nothing)
    for bias in (torch.ones(3), torch.ones(1, 4), torch.ones(4).double(), odd):
        assert into(False, value, value, value, value, value, bias, torch.ones(4))[0] == 2


@needs_rows_into
def test_a_longer_value_is_cut_only_where_it_may_be() -> None:
    value, longer = torch.ones(3, 4), torch.ones(5, 4)
    assert into(False, longer, value, longer, value, value)[0] == 0
    assert into(True, longer, value, longer, value, value)[0] == 3
    assert into(True, value, longer, value, longer, longer)[0] == 0


@needs_rows_into
def test_numbers_go_to_no_address_that_cannot_be() -> None:
    value = torch.ones(3, 4)
    room = torch.zeros(14, dtype=torch.float64)
    for address in (0, room.data_ptr() + 1):
        with pytest.raises(ValueError, match="no numbers"):
            row_norms.rows_into(address, 0, value, value, value, value, value)
    for values in ([value] * 4, [value] * 6, [value] * 8):
        with pytest.raises(TypeError, match="five or seven"):
            row_norms.rows_into(room.data_ptr(), 0, *values)


LAYOUTS = {
    "transposed": lambda: torch.randn(6, 4).t(),
    "with gaps": lambda: torch.randn(4, 12)[:, ::2],
    "expanded": lambda: torch.randn(1, 6).expand(4, 6),
    "negated": lambda: torch._neg_view(torch.randn(4, 6)),
    "parameter": lambda: torch.nn.Parameter(torch.randn(4, 6)),
    "no dimensions": lambda: torch.tensor(-3.0),
    "complex": lambda: torch.randn(4, 6, dtype=torch.complex64),
    "other dtype": lambda: torch.randn(4, 6).bfloat16(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same_numbers(way: str, layout: str) -> None:
    value = LAYOUTS[layout]()
    other = torch.randn(value.shape)
    wide = torch.complex128 if value.is_complex() else torch.float64
    expected = [
        torch.linalg.vector_norm(each, dim=-1).sum().item()
        for each in (value.detach().to(wide), value.detach().to(wide) - other)
    ]
    held(of_change(value, other), expected)


def test_biases_that_are_not_one_row_go_the_way_of_torch(way: str) -> None:
    value, between, start = (torch.randn(2, 3, 5) for _ in range(3))
    bias, start_bias = torch.randn(3, 5), torch.randn(3, 5)
    found = numbers(of_steps(value, between, start, (bias, start_bias)))
    assert found[2] == pytest.approx(sums(value - bias)[0], rel=1e-6)


def test_shapes_that_do_not_fit_are_torchs_error(way: str) -> None:
    with pytest.raises(RuntimeError, match="must match"):
        of_change(torch.randn(2, 3), torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="must match"):
        of_steps(torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3), (torch.randn(4), torch.randn(4)))


def test_tensors_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [torch.tensor([1.0, 2.0]), (3.0,), torch.tensor([4.0, 5.0, 6.0])]
    reads: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    assert read(waiting) == [(1.0, 2.0), (3.0,), (4.0, 5.0, 6.0)]
    assert len(reads) == 1


def test_a_bias_of_the_full_shape_counts_row_by_row(way: str) -> None:
    value, between, start = (torch.randn(4, 6) for _ in range(3))
    for shape in ((4, 6), (1, 6), (6,)):
        bias, start_bias = torch.randn(shape), torch.randn(shape)
        v, b, s, p, q = (each.double() for each in (value, between, start, bias, start_bias))
        held(
            of_steps(value, between, start, (bias, start_bias)),
            sums(v - b, b - s, v - p, s - q, (v - p) - (b - q)),
        )
