"""What native code may read: memory that is there, and nothing else. Each of these once crashed or read elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.reduce.references import assert_statistics
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, init_device_mesh

from torchtap.comparison import measures
from torchtap.comparison.measures import measure
from torchtap.errors import CompareError, ReductionError
from torchtap.reduce import Full, Histogram, Stats, StatsBlock, kernel
from torchtap.reduce.densify import has_memory, located
from torchtap.store.format import checksum
from torchtap.store.write.pool import HostPool


def freed_view() -> Tensor:
    """FSDP frees storages like this; the view's address is 8, which is not zero."""
    view = torch.arange(100_000.0)[2:]
    view.untyped_storage().resize_(0)
    return view


def shrunk() -> Tensor:
    value = torch.arange(100_000.0)
    value.untyped_storage().resize_(1000)
    return value


def shrunk_strided() -> Tensor:
    value = torch.arange(100_000.0).view(100, 1000).T[::2]
    value.untyped_storage().resize_(399_000)  # what is looked at last is outside
    return value


GONE: dict[str, Callable[[], Tensor]] = {
    "freed": freed_view,
    "shrunk": shrunk,
    "shrunk, strided": shrunk_strided,
}


@pytest.mark.parametrize("name", sorted(GONE))
def test_memory_that_is_gone_is_refused_by_everything_that_reads_memory(path: str, name: str) -> None:
    value = GONE[name]()
    assert located(value) is None
    assert not has_memory(value)
    block = StatsBlock(1)
    readers: list[Callable[[], Any]] = [
        lambda: Stats().update(None, value),
        lambda: Full().update(None, value),
        lambda: Histogram().update(None, value),
        lambda: block.measure_into(0, 0, value),
        lambda: HostPool().copy(value),
        lambda: measure(torch.zeros(value.shape), value),
    ]
    for read in readers:
        with pytest.raises((ReductionError, CompareError), match="freed"):
            read()
    assert block.results()[0, 0] == 0


class Wrapper(torch.Tensor):
    """A tensor without memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        opened = [each.inner if isinstance(each, Wrapper) else each for each in args]
        return func(*opened, **(kwargs or {}))


def test_no_wrapper_and_no_fake_has_an_address() -> None:
    value = torch.randn(100_000)
    with FakeTensorMode():
        fake = torch.empty(100_000)
    complex_value = torch.randn(1000, dtype=torch.complex64)
    for stranger in (
        Wrapper(value),
        fake,
        value.to("meta"),
        value.to_sparse(),
        complex_value.conj(),
        complex_value.conj().imag,
        torch.nested.nested_tensor([value]),
    ):
        assert located(stranger) is None
    for plain in (value, value[5:], value.view(100, -1).T[::2], torch.nn.Parameter(value), torch.empty(0)):
        place = located(plain)
        assert place is not None
        assert place[0] == plain.data_ptr()


@pytest.mark.skipif(measures.native is None, reason="the native kernel is not built here")
def test_wrappers_and_fakes_do_not_reach_the_distance_or_the_copy() -> None:
    value = torch.randn(100_000)
    assert measure(value, Wrapper(value * 2)).rel_l2 == pytest.approx(1)
    assert torch.equal(HostPool().copy(Wrapper(value)), value)
    with FakeTensorMode():
        fake = torch.empty(100_000)
    with pytest.raises(CompareError, match="no values"):
        measure(value, fake)
    with pytest.raises(CompareError, match="pieces"):
        measures.Sums((1e-7, 1e-40), 0.0, 0.0, False).add(0, value, value[1:])


def test_a_distributed_tensor_is_compared_by_this_ranks_shard(tmp_path: Any) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "ranks"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        value = torch.randn(1000)
        sharded = DTensor.from_local(value * 2, init_device_mesh("cpu", (1,)))
        assert located(sharded) is None
        assert measure(value, sharded).rel_l2 == pytest.approx(1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64])
def test_numbers_that_begin_between_two_addresses_are_read_by_torch(dtype: torch.dtype) -> None:
    memory = bytearray(8 * 5000 + 1)
    value = torch.frombuffer(memory, dtype=dtype, count=5000, offset=1)
    value.copy_(torch.arange(5000) % 37)
    assert located(value) is None
    assert_statistics(Stats().result(Stats().update(None, value)), [value])  # type: ignore[arg-type]


@pytest.mark.skipif(kernel.native is None, reason="the native kernel is not built here")
def test_a_native_call_refuses_addresses_that_cannot_be() -> None:
    assert kernel.native is not None
    state = torch.empty(16, dtype=torch.float64)
    for address, count in ((0, 5), (state.data_ptr() + 1, 5), (state.data_ptr(), -1)):
        with pytest.raises(ValueError, match="memory"):
            kernel.native.measure(state.data_ptr(), address, count, 0, 1)
        with pytest.raises(ValueError, match=r"size|memory"):
            kernel.native.measure_strided(state.data_ptr(), address, 0, 1, (count,), (2,))
    if measures.native is not None:
        with pytest.raises(ValueError, match="memory"):
            measures.native.sums(0, 0, state.data_ptr(), 0, 5, 0.0, 0.0, 1.0, 1.0, 1)
    if checksum.copy_bytes is not None:
        with pytest.raises(ValueError, match="copied"):
            checksum.copy_bytes(state.data_ptr(), 0, 8)


PROGRAM = """
import threading, torch
from torchtap.reduce import Stats
value = torch.ones(1 << 24)
state = []
def read():
    for _ in range(20):
        state.append(Stats().update(None, value)[0].item())
reader = threading.Thread(target=read)
reader.start()
while reader.is_alive():
    value.data = torch.ones(1 << 24)  # the old storage has no other owner
reader.join()
assert set(state) == {float(1 << 24)}
"""


def test_a_storage_that_a_tensor_lets_go_of_stays_while_it_is_read() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
