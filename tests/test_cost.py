"""A plan states its cost before anything runs; the figures are held against the bytes that a recording really takes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import torchtap as tt


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


def files_of(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def recorded_bytes(folder: Path, taps: object, steps: int) -> int:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    with tt.watch(made, folder, taps) as watch:
        watch.follow(optimizer)
        for _ in range(steps):
            made(torch.randn(16, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return files_of(folder)


def test_the_disk_of_whole_tensors_is_their_bytes(tmp_path: Path) -> None:
    made = model()
    with tt.capture(made, "*:output") as seen:
        made(torch.randn(16, 32))
    plan = tt.make_plan(made, [tt.tap("*:output", tt.Full())])
    cost = plan.cost(seen)
    assert cost.sites == 4
    assert cost.disk == sum(value.numel() * 4 for value in seen.values())
    taps = [tt.tap("*:output", tt.Full())]
    more = recorded_bytes(tmp_path / "a", taps, 40) - recorded_bytes(tmp_path / "b", taps, 20)
    assert 0.9 * cost.disk < more / 20 < 1.3 * cost.disk


def test_the_disk_of_statistics_is_that_of_a_recording(tmp_path: Path) -> None:
    made = model()
    taps = ["*:output", "*:param", "*:param_grad", "*:update"]
    with tt.capture(made, "*:output") as seen:
        made(torch.randn(16, 32))
    cost = tt.make_plan(made, [tt.tap(each) for each in taps]).cost(seen)
    assert cost.sites == 4 + 3 * 4
    more = recorded_bytes(tmp_path / "a", taps, 400) - recorded_bytes(tmp_path / "b", taps, 200)
    assert 0.3 * cost.disk < more / 200 < 1.3 * cost.disk


def test_what_is_not_known_before_a_pass_is_named() -> None:
    cost = tt.make_plan(model(), [tt.tap("*:output"), tt.tap("*:grad_output"), tt.tap("*:param")]).cost()
    assert cost.unknown == ("output", "grad_output")
    assert cost.sites == 4
    assert "not counted" in str(cost)


def test_updates_of_a_large_model_hold_a_block_and_those_of_a_small_one_a_copy() -> None:
    small = model()
    nbytes = sum(each.numel() * 4 for each in small.parameters())
    assert tt.make_plan(small, [tt.tap("*:update")]).cost().device == nbytes
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
    cost = tt.make_plan(large, [tt.tap("*:update")]).cost()
    assert cost.device < 64 << 20 < sum(each.numel() * 4 for each in large.parameters())


def test_a_capture_of_outputs_gives_gradients_their_size() -> None:
    made = model()
    with tt.capture(made, "*:output") as seen:
        made(torch.randn(16, 32))
    cost = tt.make_plan(made, [tt.tap("*:grad_output", tt.Full())]).cost(seen)
    assert cost.unknown == ()
    assert cost.host == sum(value.numel() * 4 for value in seen.values())
