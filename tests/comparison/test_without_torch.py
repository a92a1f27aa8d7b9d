"""Two recordings are compared without torch, and nothing is different for it: dtypes, files and statistics as torch has
them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap.comparison.recordings import (
    STATISTICS,
    FolderRecording,
    statistics_of,
)
from torchtap.comparison.values import Value, resolution, ulp_step, value_of
from torchtap.errors import RunCorruptError
from torchtap.store.format.dtypes import BY_NAME

FLOATS = [name for name in BY_NAME if name.startswith(("float", "bfloat")) and "float4" not in name]


def test_the_table_of_dtypes_is_what_torch_says() -> None:
    for name in BY_NAME:
        dtype = getattr(torch, name)
        if name == "float8_e5m2fnuz":
            assert resolution(name) == 0.25  # two bits of mantissa; torch's eps says three
        elif dtype.is_floating_point and "float4" not in name:
            info = torch.finfo(dtype)
            assert resolution(name) == resolution(dtype) == info.eps, name
            assert ulp_step(name) == (info.eps, max(info.smallest_normal * info.eps, 5e-324)), name
        elif not dtype.is_complex and not dtype.is_floating_point:
            assert resolution(name) == 0.0, name
    assert resolution("complex64") == resolution(torch.complex64) == torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "uint8", "int64", "bool", "complex64", "complex32"])
def test_a_value_has_the_tensor_s_numbers(dtype: str) -> None:
    tensor = (torch.randn(4, 6) * 3).to(getattr(torch, dtype))
    value = value_of(tensor.t())
    assert value.dtype == dtype
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    assert np.array_equal(value.array.astype(np.complex128), tensor.t().to(wide).numpy(), equal_nan=True)


SAVED: dict[str, Callable[[], object]] = {
    **{name: lambda name=name: torch.randn(3, 5).to(getattr(torch, name)) for name in FLOATS},
    "int64": lambda: torch.arange(12).reshape(3, 4),
    "bool": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "a turned view": lambda: torch.randn(4, 6).t(),
    "a part of a larger storage": lambda: torch.randn(40)[3:20:2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "a parameter": lambda: nn.Parameter(torch.randn(3, 2)),
    "one that has a gradient": lambda: torch.randn(3, requires_grad=True),
    "a tuple": lambda: (torch.randn(2, 3), torch.randn(1)),
    "uint16": lambda: torch.arange(6).to(torch.uint16),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_file_is_read_as_torch_reads_it(name: str, tmp_path: Path) -> None:
    torch.save(SAVED[name](), tmp_path / "layer_1_output.pt")
    loaded = torch.load(tmp_path / "layer_1_output.pt", weights_only=True)
    expected: Tensor = (loaded[0] if isinstance(loaded, tuple) else loaded).detach()
    value = FolderRecording(tmp_path).value("layer_1:output", 0)
    assert value is not None
    assert value.dtype == str(expected.dtype).removeprefix("torch.")
    assert value.shape == tuple(expected.shape)
    assert np.array_equal(value.array, value_of(expected).array, equal_nan=True)


def test_old_and_sparse_files_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "layer_1_output.pt"
    torch.save(torch.randn(3, 4), path, _use_new_zipfile_serialization=False)
    assert FolderRecording(tmp_path).value("layer_1:output", 0) is not None
    torch.save(torch.randn(3, 4).to_sparse(), path)
    value = FolderRecording(tmp_path).value("layer_1:output", 0)
    assert value is not None
    assert value.shape == (3, 4)


class Harmful:
    """Something whose reading would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("ran",)


def test_nothing_in_a_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Harmful(), tmp_path / "layer_1_output.pt")
    with pytest.raises(RunCorruptError):
        FolderRecording(tmp_path).value("layer_1:output", 0)
    assert capsys.readouterr().out == ""


def test_a_flipped_bit_in_a_large_file_is_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    value = torch.randn(2, 1 << 20)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save(value, tmp_path / name / "layer_1_output.pt")
    assert tt.compare(tmp_path / "a", tmp_path / "b").outcome == "same"
    file = tmp_path / "b" / "layer_1_output.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1  # the last bit of a number: far below every floor
    file.write_bytes(bytes(data))
    assert tt.compare(tmp_path / "a", tmp_path / "b").outcome == "cannot tell"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_statistics_are_those_a_run_records(dtype: torch.dtype) -> None:
    tensor = (torch.randn(40, 30) * 2).to(dtype)
    if dtype is torch.float32:
        tensor[0, 0], tensor[1, 1] = torch.nan, torch.inf
    reduction = tt.Stats()
    recorded = reduction.result(reduction.update(None, tensor))
    computed = statistics_of(value_of(tensor))
    for name in (set(STATISTICS) - {"value"}) | {"nans", "infs", "count"}:
        assert computed[name] == pytest.approx(float(recorded[name]), rel=1e-7), name


def test_statistics_of_nothing_have_no_size() -> None:
    assert statistics_of(Value(np.full(3, np.nan), "float64"))["nans"] == 3
    assert np.isnan(statistics_of(Value(np.empty(0), "float64"))["mean"])


COMMAND = """
import sys
from torchtap.cli import main
try:
    main(["compare", *sys.argv[1:]])
except SystemExit as stop:
    assert "torch" not in sys.modules, "torch was imported"
    sys.exit(stop.code)
"""


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 1.01)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        model[2].weight.data *= factor
        taps = [tt.tap("*:output", keep=tt.Full()), tt.tap("*:input"), tt.tap("*:param", keep=tt.Full())]
        with tt.watch(model, tmp_path / name, taps) as watch, torch.no_grad():
            for _ in range(2):
                with watch.step():
                    model(torch.ones(3, 8))
    for a, b, code in (
        ("a", "a", 0),
        ("a", "b", 1),
    ):
        words = [tmp_path / a, tmp_path / b, "--html", tmp_path / "page.html", "--explain-alignment"]
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, (a, b, done.stdout + done.stderr)
