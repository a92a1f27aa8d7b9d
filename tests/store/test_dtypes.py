"""Every dtype and every shape comes back as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.store.records import SITES, record

from torchtap.errors import MissingExtraError
from torchtap.store.format.dtypes import BY_NAME
from torchtap.store.read.reader import open_run
from torchtap.store.record import StepRecord, TensorItem
from torchtap.store.write.writer import RunWriter

DTYPES = [name for name in BY_NAME if hasattr(torch, name)]


def raw(value: torch.Tensor) -> bytes:
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * BY_NAME[dtype].size
    if dtype == "bool":
        return torch.from_numpy(np.random.default_rng(0).integers(0, 2, shape).astype(bool))
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, count).astype(np.uint8))
    if not count:
        return torch.empty(shape, dtype=kind)
    if kind.is_complex:
        real = {4: torch.float16, 8: torch.float32, 16: torch.float64}[BY_NAME[dtype].size]
        return torch.view_as_complex(data.view(real).reshape(*shape, 2))
    return data.view(kind).reshape(shape)


def round_trip(folder: Path, *values: torch.Tensor, **options: str) -> list[torch.Tensor]:
    items = tuple(TensorItem(f"site{index}", "value", "full", value) for index, value in enumerate(values))
    with RunWriter(folder, manifest={}, **options) as writer:  # type: ignore[arg-type]
        writer.write(StepRecord(0, None, None, "train", 0.0, (), items))
    run = open_run(folder)
    refs = run.tensors()
    assert [ref.shape for ref in refs] == [tuple(value.shape) for value in values]
    assert [ref.dtype for ref in refs] == [str(value.dtype).removeprefix("torch.") for value in values]
    return [run.tensor(f"site{index}") for index in range(len(values))]


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, compress: str | None) -> None:
    shapes = [(), (0,), (3,), (2, 0, 4), (5, 7)]
    values = [some(dtype, shape) for dtype in DTYPES for shape in shapes]
    values += [torch.zeros(100, 10, dtype=torch.float32).to(getattr(torch, dtype)) for dtype in DTYPES[:16]]
    found = round_trip(tmp_path, *values, compress=compress)  # type: ignore[arg-type]
    for value, back in zip(values, found, strict=True):
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert raw(back) == raw(value)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 6), max_size=5).map(tuple)),
        min_size=1,
        max_size=5,
    )
)
def test_any_shapes_come_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, tuple[int, ...]]]
) -> None:
    values = [some(dtype, shape) for dtype, shape in drawn]
    for value, back in zip(values, round_trip(tmp_path_factory.mktemp("run"), *values), strict=True):
        assert (back.dtype, back.shape, raw(back)) == (value.dtype, value.shape, raw(value))


def test_strided_conjugate_negative_and_shared_tensors_keep_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    spiral = torch.randn(3, 3, dtype=torch.complex64)
    values = [
        base.T,
        base[:, ::2],
        base[1],
        base.expand(3, 4, 6),
        base.as_strided((3, 3), (1, 1)),
        spiral.conj(),
        spiral.conj().imag,
        base,
        torch.nn.Parameter(base),
        base.to(memory_format=torch.contiguous_format)
        .reshape(1, 2, 2, 6)
        .to(memory_format=torch.channels_last),
    ]
    for value, back in zip(values, round_trip(tmp_path, *values), strict=True):
        assert torch.equal(back, value)


def test_sparse_tensors_come_back_sparse(tmp_path: Path) -> None:
    dense = torch.zeros(5, 4)
    dense[1, 2], dense[4, 0] = 3.0, -1.0
    doubled = torch.sparse_coo_tensor([[1, 1], [2, 2]], [1.0, 2.0], (5, 4))
    hybrid = torch.sparse_coo_tensor([[0, 3]], torch.ones(2, 4), (5, 4))
    values = [dense.to_sparse(), doubled, hybrid, torch.zeros(3, 3).to_sparse()]
    for value, back in zip(values, round_trip(tmp_path, *values), strict=True):
        assert back.layout is torch.sparse_coo
        assert torch.equal(back.to_dense(), value.to_dense())
    run = open_run(tmp_path)
    assert np.array_equal(run.array("site0"), dense.numpy())


def test_csr_and_quantized_tensors_are_stored_by_value(tmp_path: Path) -> None:
    dense = torch.eye(4)
    quantized = torch.quantize_per_tensor(torch.tensor([0.0, 1.0, 2.0]), 0.5, 0, torch.qint8)
    with RunWriter(tmp_path, manifest={}) as writer:
        items = (
            TensorItem("csr", "value", "full", dense.to_sparse_csr()),
            TensorItem("quantized", "value", "full", quantized),
        )
        writer.write(StepRecord(0, None, None, "train", 0.0, (), items))
    run = open_run(tmp_path)
    assert torch.equal(run.tensor("csr").to_dense(), dense)
    assert torch.equal(run.tensor("quantized"), quantized.dequantize())


@pytest.mark.parametrize("dtype", [name for name in DTYPES if "float4" not in name])
def test_numpy_gets_the_same_numbers_as_torch(tmp_path: Path, dtype: str) -> None:
    value = (
        some(dtype, (16, 16))
        if "8" not in dtype
        else torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype))
    )
    round_trip(tmp_path, value)
    array = open_run(tmp_path).array("site0")
    if value.is_complex():
        expected = value.to(torch.complex128).numpy()
    else:
        expected = value.to(torch.float64).numpy()
    assert array.shape == tuple(value.shape)
    with np.errstate(invalid="ignore"):  # random bits hold NaN that signal
        np.testing.assert_array_equal(array.astype(expected.dtype), expected)


def test_any_safetensors_reader_opens_the_segments(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={}) as writer:
        writer.write(record(4, tensors=1, size=2**19))  # past the size at which a segment is streamed
    (path,) = tmp_path.rglob("tensors-*")
    with safe_open(path, framework="pt") as opened:
        (name,) = opened.keys()
        assert name == f"4/full/value/{SITES[0]}"
        assert torch.equal(opened.get_tensor(name), open_run(tmp_path).tensor(SITES[0]))
    (path,) = tmp_path.rglob("scalars-*")
    with safe_open(path, framework="np") as opened:
        assert opened.get_tensor("clock.step").tolist() == [4]
        assert opened.get_tensor("grid0.values").shape == (3, 3, 1)


def test_compression_is_lossless_and_pays_on_smooth_data(tmp_path: Path) -> None:
    value = torch.linspace(0, 1, 2**16)
    (back,) = round_trip(tmp_path, value, compress="zstd")
    assert torch.equal(back, value)
    (ref,) = open_run(tmp_path).tensors()
    assert ref.nbytes < 0.6 * value.nbytes
    assert ref.shape == (2**16,)


def test_an_unknown_compression_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'zstd' and None"):
        RunWriter(tmp_path, manifest={}, compress="rar")


def test_compression_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"torchtap\[compress\]") as caught:
        RunWriter(tmp_path, manifest={}, compress="zstd")
    assert caught.value.extra == "compress"
