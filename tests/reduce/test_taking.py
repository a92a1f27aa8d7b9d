"""Tensors that native code takes as they are: the numbers of the longer way, and nothing that it may not read."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tests.reduce.references import NAMES, assert_statistics
from tests.reduce.test_memory import GONE, Wrapper
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtap.reduce import StatsBlock, kernel

pytestmark = pytest.mark.skipif(
    kernel.make_taker() is None, reason="tensors cannot be taken as they are here"
)


def statistics(block: StatsBlock, row: int) -> dict[str, float]:
    return dict(zip(NAMES, block.results()[row].tolist(), strict=True))


LAYOUTS = {
    "contiguous": lambda value: value,
    "transposed": lambda value: value.T,
    "every other": lambda value: value[::2, 1:],
    "permuted": lambda value: value.view(8, -1, 3).permute(2, 0, 1)[:, 1:],
    "expanded": lambda value: value[:1].expand(5, -1),
    "one element": lambda value: value[3, 4],
    "none": lambda value: value[:0],
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("dtype", list(kernel.DTYPE_CODES), ids=str)
def test_any_dtype_and_layout_has_the_numbers_of_the_longer_way(
    dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = LAYOUTS[layout](torch.randn(48, 33).mul_(5).to(dtype))
    block = StatsBlock(3)
    assert block.take(0, value)
    block.measure_into(1, 0, value)
    monkeypatch.setattr(kernel, "_has_takers", False)
    block.measure_into(2, 0, value)
    states = block.states()
    np.testing.assert_array_equal(states[0], states[1])
    np.testing.assert_array_equal(states[0], states[2])
    if value.numel() > 1:
        assert_statistics(statistics(block, 0), [value])


def test_a_torch_whose_methods_are_no_plain_functions_is_refused_and_nothing_changes() -> None:
    tensor = torch.zeros(())
    asked = (tensor.storage_offset, *[len] * 3)
    exchange = Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    assert kernel.native is not None
    assert not kernel.native.use_tensors(exchange, (Tensor,), asked)
    block = StatsBlock(1)
    assert block.take(0, torch.ones(3))
    assert statistics(block, 0)["mean"] == 1.0


@pytest.mark.parametrize("name", sorted(GONE))
def test_memory_that_is_gone_is_not_taken(name: str) -> None:
    block = StatsBlock(1)
    value = GONE[name]()
    assert not block.take(0, value)
    assert not block.take_any(0, value)
    assert block.states()[0, 0] == 0


def test_what_is_no_plain_memory_is_left_alone() -> None:
    value = torch.randn(100)
    with FakeTensorMode():
        fake = torch.empty(100)
    twisted = torch.randn(10, dtype=torch.complex64)
    block = StatsBlock(1)
    strangers: list[Tensor] = [
        Wrapper(value),
        fake,
        value.to("meta"),
        value.to_sparse(),
        twisted,
        twisted.conj().imag,
        torch.nested.nested_tensor([value]),
        torch.frombuffer(bytearray(41), dtype=torch.float32, count=10, offset=1),
        torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
        torch.zeros(3, dtype=torch.uint16),
    ]
    assert [block.take(0, each) for each in strangers] == [False] * len(strangers)
    assert [block.take_any(0, each) for each in strangers] == [False] * len(strangers)
    inside: list[bool] = []
    torch.func.vmap(lambda x: (inside.append(block.take(0, x)), x)[1])(torch.ones(3, 4))
    torch.func.vmap(lambda x: (inside.append(block.take_any(0, x)), x)[1])(torch.ones(3, 4))
    assert inside == [False, False]
    assert block.states()[0, 0] == 0


def test_a_value_that_is_shown_again_is_recognised_until_it_changes() -> None:
    block = StatsBlock(3)
    value = torch.ones(4)
    assert block.take(0, value)
    value.data.zero_()  # past the version counter: who is recognised is not read
    assert block.take(1, value)
    assert statistics(block, 1)["mean"] == 1
    value.fill_(7)
    assert block.take(2, value)
    assert statistics(block, 2)["mean"] == 7
    value.data.zero_()
    block.forget()
    block.reset(slice(2, 3))
    assert block.take(2, value)
    assert statistics(block, 2)["mean"] == 0


def test_a_new_value_at_the_place_of_an_old_one_is_another() -> None:
    block = StatsBlock(1)
    for number in range(200):  # addresses and identities are used again at once
        assert block.take(0, torch.full((3,), float(number)))
    assert statistics(block, 0)["mean"] == pytest.approx(99.5)


def test_inference_tensors_are_read_each_time() -> None:
    block = StatsBlock(2)
    with torch.inference_mode():
        value = torch.ones(4)
        assert block.take(0, value)
        value.mul_(3)
        assert block.take(1, value)
    assert statistics(block, 1)["mean"] == 3


def test_large_values_are_taken_only_where_the_caller_has_a_lock() -> None:
    block = StatsBlock(2)
    value = torch.randn(kernel.MANY + 5)
    assert not block.take(0, value)
    assert block.take_any(0, value)
    block.measure_into(1, 0, value)
    np.testing.assert_array_equal(*block.states())


def test_rows_move_when_there_are_more_and_a_row_that_is_not_there_is_an_error() -> None:
    block = StatsBlock(2)
    block.take(1, torch.ones(3))
    with pytest.raises(IndexError):
        block.take(2, torch.ones(3))
    block.grow(5000)
    assert block.take(4999, torch.ones(3))
    assert [block.states()[row, 0] for row in (0, 1, 4999)] == [0, 3, 3]


def test_nonsense_is_refused() -> None:
    block = StatsBlock(2)
    for call in (
        lambda: block.take("row", torch.ones(3)),  # type: ignore[arg-type]
        lambda: block._taker.take(0),
        lambda: block._taker.take_any(0, torch.ones(3), 0),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    assert not block.take(0, "no tensor")  # type: ignore[arg-type]
    assert not block.take(0, None)  # type: ignore[arg-type]


def test_threads_lose_no_value() -> None:
    block = StatsBlock(1)

    def work() -> None:
        for _ in range(2000):
            block.take(0, torch.ones(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert block.states()[0, 0] == 4 * 2000 * 5


def test_results_of_some_rows_are_those_of_the_plain_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    block = StatsBlock(9)
    values = [
        torch.randn(50),
        torch.tensor([]),
        torch.tensor([2.0]),
        torch.tensor([torch.nan, torch.inf]),
        torch.tensor([0.0, -0.0, 3.0, torch.nan]),
        torch.tensor([1e300, -1e300], dtype=torch.float64),
        torch.tensor([5e-324, 0.0], dtype=torch.float64),
        torch.full((7,), -3.5),
    ]
    for row, value in enumerate(values):
        block.take(row, value)
    chosen = np.array([8, 0, 3, 7, 6, 5, 4, 2, 1])
    native = block.results(chosen)
    monkeypatch.setattr(block, "_native", None)
    np.testing.assert_allclose(native, block.results(chosen), rtol=1e-15)
    np.testing.assert_allclose(block.results()[chosen], native, rtol=1e-15)


def test_many_small_tensors_replace_their_rows_in_one_call_and_the_others_are_returned() -> None:
    block = StatsBlock(3)
    block.take(0, torch.full((4,), 9.0))
    values = [torch.ones(3), torch.ones(kernel.MANY + 1), torch.full((2,), 5.0)]
    assert list(block.put_each([0, 1, 2], values)) == [1]
    assert [statistics(block, row)["count"] for row in range(3)] == [3, 0, 2]
    assert statistics(block, 0)["mean"] == 1.0
    with pytest.raises(IndexError):
        block.put_each([3], [torch.ones(2)])
    with pytest.raises(TypeError, match="as many"):
        block.put_each([0, 1], [torch.ones(2)])
