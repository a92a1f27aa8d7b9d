"""The Triton kernel: right in Triton's interpreter, accepted by its compilers, and never in the way.

There is no GPU in these tests. Triton is at work in processes of its own, so that its interpreter patches nobody else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.reduce.test_stats import measured
from tests.torch_limits import INTERPRETED_TRITON

from torchtap.reduce import device_kernel, kernel, stats
from torchtap.reduce.moments import measure_with_torch

ROOT = Path(__file__).parents[2]
# `make test` puts it beside the other packages: torch would load it in every process that compiles.
BESIDE = Path(sys.prefix) / "triton"

needs_triton = pytest.mark.skipif(
    not BESIDE.is_dir() and find_spec("triton") is None,
    reason="`make test` puts Triton there where it is made for the platform",
)


def run(*arguments: str, **environment: str) -> str:
    path = os.pathsep.join([str(BESIDE), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
@INTERPRETED_TRITON.skip
def test_the_kernel_gives_the_statistics_of_the_definition_in_the_interpreter() -> None:
    out = run(
        *("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"),
        *("-W", "ignore::RuntimeWarning"),  # numpy stands in for the device, and tells of each overflow
        *("tests/reduce/triton_in_its_interpreter.py", "tests/reduce/test_stats.py"),
        "tests/reduce/test_stats_block.py",
        # Left out is what takes the interpreter long: many values, long ones, and what is asked at the real block size.
        *("-k", "interpreter or (triton and not (any_tensors or whole_and or hundred or more_folds))"),
        TRITON_INTERPRET="1",
    )
    assert " passed" in out
    assert "skipped" not in out


COMPILE = """
import sys, torch, torchtap
from torchtap.reduce import Stats
Stats().update(None, torch.randn(9))
assert "triton" not in sys.modules, "a value on the CPU has nothing to do with Triton"
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torchtap.reduce import triton_kernel as kernels
def binary(kernel, target, kind, **types):
    constants = {"BLOCK": 1024, **({"COMPARED": types.pop("compared")} if "compared" in types else {})}
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=target, options=kernels._OPTIONS).asm[kind]
for target, kind, memory, compared in [
    (GPUTarget("cuda", 80, 32), "cubin", "*bf16", tl.float32),
    (GPUTarget("cuda", 90, 32), "cubin", "*fp32", tl.float32),
    (GPUTarget("hip", "gfx942", 64), "hsaco", "*i64", tl.float64),
]:
    binary(
        kernels._read, target, kind, memory=memory, states="*fp64", count="i64", tiles="i32", compared=compared
    )
    binary(kernels._join, target, kind, parts="*fp64", state="*fp64", count="i32")
"""


@needs_triton
def test_the_kernel_compiles_for_gpus_and_is_not_loaded_before_there_is_a_value_for_it(
    tmp_path: Path,
) -> None:
    run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.fixture
def on_the_device_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values on the CPU take the way of values on a GPU."""
    monkeypatch.setattr(kernel, "native", None)
    monkeypatch.setattr(device_kernel, "_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(device_kernel, "_launch", None)
    monkeypatch.setattr(device_kernel, "_possible", True)


@pytest.mark.usefixtures("on_the_device_path")
def test_without_triton_torch_ops_do_the_work(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setitem(sys.modules, "torchtap.reduce.triton_kernel", None)
    assert measured(torch.arange(5.0))["mean"] == 2
    assert not device_kernel._possible
    assert not recwarn.list


@pytest.mark.usefixtures("on_the_device_path")
def test_a_triton_that_fails_is_named_once_and_torch_ops_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(state: torch.Tensor, value: torch.Tensor) -> None:
        tried.append(value)
        raise RuntimeError("no C compiler was found")

    monkeypatch.setattr(device_kernel, "_launch", fail)
    with pytest.warns(RuntimeWarning, match="no C compiler was found"):
        assert measured(torch.arange(5.0))["mean"] == 2
    assert measured(torch.arange(7.0))["mean"] == 3
    assert len(tried) == 1


@pytest.mark.usefixtures("on_the_device_path")
def test_running_out_of_memory_is_no_reason_to_give_triton_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(state: torch.Tensor, value: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(device_kernel, "_launch", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        stats.measure(torch.arange(5.0))
    monkeypatch.setattr(device_kernel, "_launch", lambda state, value: state.copy_(measure_with_torch(value)))
    assert measured(torch.arange(5.0))["mean"] == 2
