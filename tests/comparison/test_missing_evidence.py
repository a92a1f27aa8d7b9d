"""What is missing, unreadable or of another shape is evidence: it is never called the same."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchtap as tt


def recorded(
    folder: Path, model: nn.Module, x: Tensor, *selectors: str, keep: Any = None, steps: int = 1
) -> Path:
    taps = [tt.tap(selector, keep=keep or tt.Full()) for selector in selectors or ("*:output", "*:input")]
    with tt.watch(model, folder, taps) as watch, torch.no_grad():
        for _ in range(steps):
            with watch.step():
                model(x)
    return folder


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.parametrize(
    "target",
    [
        {"a": torch.ones(2, 3), "b": torch.ones(4, 3)},
        {"a": torch.ones(4, 3, 1), "b": torch.ones(4, 3)},
        {"a": torch.ones(3, 4), "b": torch.ones(4, 3)},
        {"a": torch.ones(0, 3), "b": torch.ones(4, 3)},
    ],
)
def test_another_shape_is_a_difference(target: dict[str, Tensor]) -> None:
    result = tt.compare({"a": torch.ones(4, 3), "b": torch.ones(4, 3)}, target)
    assert result.outcome == "differs"
    assert result.first is not None
    assert result.first.site == "a"
    assert result.first.sure != "certain"
    assert str(tuple(target["a"].shape)) in result.verdict


def test_few_sites_in_common_cannot_tell(net: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    whole = recorded(tmp_path / "a", net, x)
    part = recorded(tmp_path / "b", net, x, "0:output", ":output")
    result = tt.compare(whole, part)
    assert result.outcome == "cannot tell"
    assert "2 of 12 sites" in result.verdict


def test_sites_inside_a_module_that_agrees_may_be_missing(net: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    whole = recorded(tmp_path / "a", net, x, "*:output")
    part = recorded(tmp_path / "b", net, x, "0:output", "1:output", "2:output", ":output")
    result = tt.compare(whole, part)
    assert result.outcome == "same"
    assert "4 of 6 sites" in result.verdict


def test_a_flipped_byte_is_never_the_same(net: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    a, b = recorded(tmp_path / "a", net, x), recorded(tmp_path / "b", net, x)
    for segment in [path for path in b.rglob("tensors-*") if path.is_file()]:
        data = bytearray(segment.read_bytes())
        for at in (len(data) // 3, len(data) // 2, len(data) - 9):
            hurt = bytearray(data)
            hurt[at] ^= 0x10
            segment.write_bytes(bytes(hurt))
            assert _outcome(a, b) != "same", at
        segment.write_bytes(bytes(data))
    assert _outcome(a, b) == "same"


def _outcome(a: Path, b: Path) -> str:
    try:
        return tt.compare(a, b).outcome
    except tt.TorchtapError:
        return "error"


@pytest.mark.parametrize("kind", ["whole tensors", "statistics"])
def test_damaged_and_cut_recordings_are_never_the_same(net: nn.Module, tmp_path: Path, kind: str) -> None:
    """A part of the fuzz; `benchmarks/fuzz_compare.py` runs thousands."""
    from benchmarks.fuzz_compare import damage

    keep = tt.Full() if kind == "whole tensors" else tt.Stats()
    a = recorded(tmp_path / "a", net, torch.randn(3, 8), keep=keep, steps=2)
    random_source = random.Random(0)
    for n in range(60):
        b = tmp_path / f"b{n}"
        shutil.copytree(a, b)
        what = damage(b, random_source)
        assert _outcome(a, b) != "same", what
        shutil.rmtree(b)


def test_numpy_arrays_and_numbers_are_values_and_the_rest_is_told() -> None:
    arrays = {"x": np.arange(6.0).reshape(2, 3), "flag": True, "text": "abc"}
    assert tt.compare(arrays, {"x": torch.arange(6.0).reshape(2, 3).double(), "flag": True}).outcome == "same"
    changed = {"x": np.arange(6.0).reshape(2, 3) * 2, "flag": True}
    result = tt.compare(arrays, changed)
    assert result.outcome == "differs"
    assert "2 × the reference's" in result.verdict
    assert any("text is a str" in problem for problem in result.problems)


def test_statistics_are_compared_with_whole_tensors(net: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    whole = recorded(tmp_path / "a", net, x)
    numbers = recorded(tmp_path / "b", net, x, keep=tt.Stats())
    result = tt.compare(whole, numbers)
    assert result.outcome == "same"
    assert {row.note for row in result.rows} == {"statistics only"}
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[2].weight.mul_(1.1)  # type: ignore[operator, union-attr]
    first = tt.compare(whole, recorded(tmp_path / "c", other, x, keep=tt.Stats())).first
    assert first is not None
    assert first.module == "2"


def test_nan_is_told_as_nan() -> None:
    reference = {"x:output": torch.ones(4), "y:output": torch.ones(4)}
    target = {"x:output": torch.tensor([1.0, float("nan"), 1.0, 1.0]), "y:output": torch.ones(4)}
    result = tt.compare(reference, target)
    assert (
        "NaN or infinite in 1 place of one side alone (0 in the reference, 1 in the target)" in result.verdict
    )
    assert "relative error 0" not in result.verdict


def test_a_truncated_run_is_said_to_be_damaged(net: nn.Module, tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", net, torch.randn(3, 8))
    b = recorded(tmp_path / "b", net, torch.randn(3, 8))
    for segment in [path for path in b.rglob("*") if path.is_file() and path.suffix != ".json"]:
        segment.write_bytes(segment.read_bytes()[:10])
    with pytest.raises(tt.CompareError) as caught:
        tt.compare(a, b)
    assert "are these recordings of the same model" not in str(caught.value)
