"""Watching for long costs no more memory than watching for a while, and no more files than it has to."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtap as tt

_MIB = 1 << 20


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _watch_steps(watch: tt.Watch, model: nn.Module, steps: int) -> None:
    x = torch.ones(2, 4)
    for _ in range(steps):
        with watch.step():
            model(x).sum().backward()


def _tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_memory_and_files_stay_flat_over_ten_thousand_watched_steps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    taps = [tt.tap("*:output"), tt.tap("*:param_grad", every=2), tt.tap("2:output", tt.Full(), every=100)]
    with tt.watch(model, tmp_path / "run", taps) as watch:
        _watch_steps(watch, model, 2_000)
        watch.flush()
        gc.collect()
        before = _resident()
        _watch_steps(watch, model, 8_000)
        watch.flush()
        gc.collect()
        grown = _resident() - before
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"grown by {grown / _MIB:.1f} MiB; {size / _MIB:.1f} MiB in {len(files)} files")
    assert grown < 16 * _MIB
    assert len(files) < 100
    # Eight sites of twelve numbers, half of them every other step: the numbers themselves are 5.8 MB.
    assert size < 10 * _MIB
    assert len(tt.open(tmp_path / "run").series("2:output", "mean").steps) == 10_000


@pytest.mark.parametrize("form", ["eager", "compiled", "scripted", "traced by FX"])
def test_what_a_look_kept_is_let_go_of_with_it_without_a_collection(form: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    if form == "compiled":
        model = torch.compile(model, backend="aot_eager")
    elif form == "scripted":
        model = torch.jit.script(model)
    elif form == "traced by FX":
        model = torch.fx.symbolic_trace(model)
    gc.collect()
    gc.disable()
    try:
        with tt.capture(model, ["2:output", "2:grad_output"]) as seen:
            model(torch.ones(2, 4)).sum().backward()
        kept = weakref.ref(seen["2:output"])
        del seen
        assert kept() is None
    finally:
        gc.enable()


def test_a_step_leaves_no_tensor_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    taps = [tt.tap("*:output"), tt.tap("*:grad_output"), tt.tap("*:output", tt.Full())]
    with tt.watch(model, None, taps) as watch:
        _watch_steps(watch, model, 3)
        before = _tensors_alive()
        _watch_steps(watch, model, 50)
        assert _tensors_alive() == before


@pytest.mark.parametrize("keep", [tt.Stats(), tt.Full(), tt.Quantiles()], ids=lambda keep: keep.name)
def test_a_value_that_the_model_lets_go_of_is_gone_at_once_though_the_step_is_open(keep: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with tt.watch(model, None, tt.tap(["*:output", "*:input"], keep)) as watch, watch.step():
        x = torch.ones(2, 4)
        given, output = weakref.ref(x), model(x)
        returned = weakref.ref(output)
        gc.disable()  # it has to go by itself, not with the next collection
        try:
            del x, output
            assert returned() is None
            assert given() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("taps", [["*:output"], ["*:input", "*:grad_output", "*:param", "*:param_grad"]])
@pytest.mark.parametrize("times", [1, 3])
def test_a_captured_model_is_gone_when_it_is_let_go_of(taps: list[str], times: int) -> None:
    """At once, not when Python next looks for cycles: what is on a GPU is needed for the next model."""
    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        there = weakref.ref(model)
        for _ in range(times):
            with tt.capture(model, *taps) as seen:
                model(torch.randn(3, 4)).sum().backward()
        values = dict(seen)
        assert values
        del model, seen
        assert there() is None
    finally:
        gc.enable()


def test_an_edited_model_is_gone_when_it_is_let_go_of() -> None:
    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        there = weakref.ref(model)
        with tt.edit(model, {"0:output": lambda value: value * 2}):
            model(torch.randn(3, 4))
        del model
        assert there() is None
    finally:
        gc.enable()
