"""Whatever happens to a recording, the training goes on with the same losses, and the run says what was lost."""

from __future__ import annotations

import os
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap.session.watch import Watch
from torchtap.store.record import StepRecord


def train(watch_it: Any = None, steps: int = 12) -> tuple[list[float], Watch | None]:
    """Losses of a short training, and the watch that accompanied it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch = None if watch_it is None else watch_it(model)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(steps):
            if watch is not None:
                watch.set_step(step)
            x = torch.randn(64, 16)
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if watch is not None:
            watch.close()
    return losses, watch


TAPS: list[Any] = [tt.tap("*:*"), tt.tap("*:output", tt.Full())]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return train()[0]


def test_a_recording_leaves_the_losses_bit_identical(plain: list[float], tmp_path: Path) -> None:
    losses, watch = train(lambda model: tt.watch(model, tmp_path / "run", TAPS))
    assert losses == plain
    assert watch is not None
    assert watch.lost == []
    run = tt.open(tmp_path / "run")
    assert run.steps().tolist() == list(range(12))
    assert run.tensor("0:output", step=3).shape == (64, 64)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_costs_values_and_is_told(plain: list[float], small_disk: Path) -> None:
    losses, _watch = train(lambda model: tt.watch(model, small_disk / "run", TAPS))
    assert losses == plain
    run = tt.open(small_disk / "run")
    assert run.problems or run.events("lost"), "the run does not say that anything was lost"
    for step in run.steps("0:output"):
        assert run.series("0:output", "count").values[0] == 64 * 64, step


def test_a_folder_that_cannot_be_made_costs_the_run_only(plain: list[float], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    losses, watch = train(lambda model: tt.watch(model, tmp_path / "file" / "run", TAPS))
    assert losses == plain
    assert any("cannot begin a run" in text for text in watch.lost)


def test_strict_makes_an_unusable_folder_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((tt.TorchtapError, OSError)):
        train(lambda model: tt.watch(model, tmp_path / "file" / "run", TAPS, strict=True))


def test_a_metric_that_raises_now_and_then_costs_those_values_only(
    plain: list[float], tmp_path: Path
) -> None:
    calls = [0]

    def moody(value: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] % 2:
            raise ValueError("not today")
        return value.mean()

    tap = tt.tap("0:output", tt.Metric(moody, name="moody"))
    losses, watch = train(lambda model: tt.watch(model, tmp_path / "run", tap))
    assert losses == plain
    assert watch is not None
    assert any("not today" in message for message in watch.lost)
    run = tt.open(tmp_path / "run")
    assert len(run.series("0:output", "moody").values) == 6
    assert any("not today" in str(event) for event in run.events("lost"))


def test_a_consumer_slower_than_the_training_loses_nothing_by_default(
    plain: list[float], tmp_path: Path
) -> None:
    class Slow:
        def write(self, record: StepRecord) -> None:
            time.sleep(0.01)

        def close(self) -> None:
            pass

    def watched(model: nn.Module) -> Watch:
        return tt.watch(model, tmp_path / "run", TAPS, sinks=[Slow()], queue_bytes=1 << 16)

    losses, _ = train(watched)
    assert losses == plain
    assert len(tt.open(tmp_path / "run").steps()) == 12


def test_a_second_training_in_the_same_folder_does_not_write_over_the_first(tmp_path: Path) -> None:
    train(lambda model: tt.watch(model, tmp_path / "run", "*:output"), steps=5)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.safetensors")}
    train(lambda model: tt.watch(model, tmp_path / "run", "*:output"), steps=3)
    assert before
    assert all(path.read_bytes() == data for path, data in before.items())
    assert len(tt.open(tmp_path / "run", attempt=0).steps()) == 5
