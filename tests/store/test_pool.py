"""Pooled copies: right, safe to keep, bounded."""

from __future__ import annotations

import gc
import threading
import weakref
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtap as tt
from torchtap.store.format import checksum
from torchtap.store.format.dtypes import BY_NAME
from torchtap.store.read.reader import open_run
from torchtap.store.record import StepRecord, TensorItem
from torchtap.store.write import segments
from torchtap.store.write.pool import HostPool, pool_of
from torchtap.store.write.writer import RunWriter


@pytest.fixture(params=["past the cache", "by torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: as it is, and as if the native copy had not been built."""
    if request.param == "by torch":
        monkeypatch.setattr(checksum, "copy_bytes", None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [name for name in BY_NAME if hasattr(torch, name)])
def test_a_copy_has_the_same_bits_and_its_own_memory(dtype: str) -> None:
    pool = HostPool()
    kind = getattr(torch, dtype)
    source = torch.randint(0, 2, (2**20,), dtype=torch.uint8)
    value = source.view(kind) if not kind.is_complex else source.view(torch.float32)
    copied = pool.copy(value)
    assert torch.equal(copied.view(torch.uint8), source)
    assert copied.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    assert not vars(copied)


@pytest.mark.usefixtures("way")
def test_complex_strided_small_empty_sparse_and_gradient_carrying_values_are_copied() -> None:
    pool = HostPool()
    complex_value = torch.randn(300, 300, dtype=torch.complex64)
    for value in (
        complex_value,
        complex_value.conj(),
        complex_value.conj().imag,  # a negation that is only noted
        torch.randn(400, 300).T,
        torch.ones(3),
        torch.empty(0, 4),
    ):
        copied = pool.copy(value)
        assert torch.equal(copied, value)
        assert copied.is_contiguous()
    assert torch.equal(pool.copy(torch.eye(300).to_sparse()).to_dense(), torch.eye(300))
    assert not pool.copy(torch.ones(300, 300, requires_grad=True)).requires_grad


@given(start=st.integers(0, 70), size=st.integers(70 << 10, 71 << 10))
def test_a_copy_past_the_cache_begins_and_ends_where_it_should(start: int, size: int) -> None:
    source = torch.arange(72 << 10).to(torch.uint8)
    copied = HostPool().copy(source[start : start + size])
    assert torch.equal(copied, source[start : start + size])


@pytest.mark.skipif(checksum.copy_bytes is None, reason="not built, or a processor without the instruction")
@given(target=st.integers(0, 70), size=st.integers(0, 2000))
def test_a_copy_past_the_cache_writes_nothing_beside_its_target(target: int, size: int) -> None:
    assert checksum.copy_bytes is not None
    source, memory = torch.full((2000,), 7, dtype=torch.uint8), torch.zeros(2200, dtype=torch.uint8)
    crc = checksum.copy_bytes(memory.data_ptr() + target, source.data_ptr(), size)
    assert memory[target : target + size].eq(7).all()
    assert memory.count_nonzero() == size
    assert crc == zlib.crc32(b"\7" * size)


def test_memory_is_used_again_once_a_copy_is_gone() -> None:
    pool = HostPool()
    value = torch.randn(2**18)
    first = pool.copy(value)
    place = first.data_ptr()
    del first
    assert pool.copy(value).data_ptr() == place
    held = pool.nbytes
    for _ in range(100):
        pool.copy(value)
    assert pool.nbytes == held


def test_a_view_of_a_copy_keeps_its_memory() -> None:
    pool = HostPool()
    kept = pool.copy(torch.full((2**18,), 7.0))[10:20]
    gc.collect()
    for _ in range(50):
        pool.copy(torch.zeros(2**18))
    assert kept.tolist() == [7.0] * 10


def test_past_its_bound_the_pool_makes_ordinary_copies() -> None:
    pool = HostPool(limit=4 << 20)
    kept = [pool.copy(torch.full((2**18,), float(index))) for index in range(10)]
    assert pool.nbytes <= 4 << 20
    assert [copied[0].item() for copied in kept] == list(range(10))


def test_a_new_size_takes_the_place_of_an_old_one() -> None:
    pool = HostPool(limit=8 << 20)
    for size in (2**18, 2**19, 2**20):
        assert pool.copy(torch.ones(size)).sum() == size
        assert 4 * size <= pool.nbytes <= 8 << 20


def test_several_threads_never_share_a_buffer() -> None:
    pool = HostPool()
    wrong = []

    def work(number: int) -> None:
        value = torch.full((2**17,), float(number))
        wrong.extend(number for _ in range(100) if not torch.equal(pool.copy(value), value))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_writer_gives_buffers_back_and_what_it_wrote_is_right(tmp_path: Path) -> None:
    pool = HostPool(limit=64 << 20)
    value = torch.zeros(2**18)
    with RunWriter(tmp_path, manifest={}) as writer:
        for step in range(100):
            value.fill_(step)
            item = TensorItem("a:output", "value", "full", pool.copy(value))
            writer.write(StepRecord(step, None, None, "train", 0.0, (), (item,)))
            del item
            value.fill_(-1)
            if step % 10 == 0:
                writer.flush()
    assert pool.nbytes <= 64 << 20
    run = open_run(tmp_path)
    for step in range(100):
        assert set(run.array("a:output", step).tolist()) == {float(step)}


@pytest.mark.skipif(checksum.copy_bytes is None, reason="not built, or a processor without the instruction")
def test_the_writer_takes_the_checksum_from_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(
        segments, "checksum", lambda data, *so_far: taken.append(len(data)) or zlib.crc32(data)
    )
    values = [torch.randn(2**18, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64)]
    pool = HostPool()
    with RunWriter(tmp_path, manifest={}) as writer:
        for step in range(6):  # the first are held in memory, the last go to the file at once
            items = tuple(
                TensorItem(f"a{index}:output", "value", "full", pool.copy(value))
                for index, value in enumerate(values)
            )
            writer.write(StepRecord(step, None, None, "train", 0.0, (), items))
    assert not taken
    run = open_run(tmp_path)
    for step in range(6):
        for index, value in enumerate(values):
            assert torch.equal(run.tensor(f"a{index}:output", step), value)


@pytest.mark.skipif(checksum.copy_bytes is None, reason="not built, or a processor without the instruction")
def test_what_a_watch_records_was_checked_while_it_was_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(
        segments, "checksum", lambda data, *so_far: taken.append(len(data)) or zlib.crc32(data)
    )
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU())
    kept = [tt.tap("*:output", keep=tt.Full()), tt.tap("*:param_grad", keep=tt.Full())]
    with tt.watch(model, tmp_path, kept) as watch, watch.step():
        model(torch.randn(128, 256)).sum().backward()
    assert set(taken) == {256 * 4}  # the bias is too small for the pool
    assert torch.equal(tt.open(tmp_path).tensor("0:param_grad.weight", step=0), model[0].weight.grad)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_copy_that_was_changed_is_stored_as_it_is_when_it_is_written(tmp_path: Path, mode: Any) -> None:
    with mode():
        copied = HostPool().copy(torch.ones(2**18))
        copied.mul_(3)
    with RunWriter(tmp_path, manifest={}) as writer:
        items = (
            TensorItem("a:output", "value", "full", copied),
            TensorItem("b:output", "value", "full", copied.view(2, -1)),
        )
        writer.write(StepRecord(0, None, None, "train", 0.0, (), items))
    run = open_run(tmp_path)
    assert set(run.array("a:output", 0).tolist()) == {3.0}
    assert run.array("b:output", 0).shape == (2, 2**17)


def test_without_the_native_part_the_same_bytes_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtap.store.files.folder.new_run_id", lambda: "0123456789abcdef")
    values = [torch.randn(2**18 + index) for index in range(8)]

    def tensor_files(folder: Path) -> list[bytes]:
        pool = HostPool()
        with RunWriter(folder, manifest={}) as writer:
            items = tuple(
                TensorItem(f"a{index}:output", "value", "full", pool.copy(value))
                for index, value in enumerate(values)
            )
            writer.write(StepRecord(0, None, None, "train", 0.0, (), items))
        return [file.read_bytes() for file in sorted(folder.rglob("tensors-*"))]

    native = tensor_files(tmp_path / "native")
    monkeypatch.setattr(checksum, "copy_bytes", None)
    monkeypatch.setattr(segments, "checksum", zlib.crc32)
    assert native
    assert tensor_files(tmp_path / "without") == native


def test_a_model_has_one_pool_that_goes_with_it() -> None:
    model = torch.nn.Linear(2, 2)
    pool = weakref.ref(pool_of(model))
    assert pool_of(model) is pool()
    assert pool_of(torch.nn.Linear(2, 2)) is not pool()
    del model
    gc.collect()
    assert pool() is None


@pytest.mark.skipif(checksum.copy_bytes is None, reason="not built, or a processor without the instruction")
def test_the_checksum_is_that_of_the_copy_also_where_the_source_changes_meanwhile() -> None:
    assert checksum.copy_bytes is not None
    size = 4099  # a head, whole lines and a tail
    source = torch.zeros(1 << 20, dtype=torch.uint8)
    target = torch.zeros(1 << 20, dtype=torch.uint8)
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            source.add_(1)  # lets go of the interpreter while it writes

    writer = threading.Thread(target=change)
    writer.start()
    try:
        for turn in range(6000):
            start = (turn * 37) % 4000
            crc = checksum.copy_bytes(target.data_ptr() + 1, source.data_ptr() + start, size)
            assert crc == zlib.crc32(target[1 : 1 + size].numpy().data)
    finally:
        done.set()
        writer.join()
