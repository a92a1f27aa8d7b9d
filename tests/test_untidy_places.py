"""A training goes on with the same losses wherever its run is and whatever happens there; what is missing is told."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtap as tt

During = Callable[[int, tt.Watch, Path], None]
STEPS = 10


def train(folder: Path | None = None, during: During | None = None) -> tuple[list[str], list[str]]:
    """The losses exactly, and what was lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = (
            None
            if folder is None
            else tt.watch(model, folder, ["*:output", "*:param_grad"]).follow(optimizer)
        )
        for step in range(STEPS):
            loss = model(torch.randn(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if watch is not None and during is not None and folder is not None:
                during(step, watch, folder)
            optimizer.step()
            losses.append(loss.item().hex())
        if watch is not None:
            watch.close()
    return losses, [] if watch is None else watch.lost


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return train()[0]


@pytest.mark.parametrize("name", [os.fsdecode(b"\xff\xfe-run"), "a\n\x1b[2Jb", " ", "-rf", "%s{0}"])
def test_a_folder_may_have_any_name(tmp_path: Path, plain: list[str], name: str) -> None:
    losses, lost = train(tmp_path / name)
    assert losses == plain
    assert lost == []
    assert tt.open(tmp_path / name).steps().tolist() == list(range(STEPS))


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 25), "file", "file/below"])
def test_a_folder_that_cannot_be_is_told(tmp_path: Path, plain: list[str], name: str) -> None:
    (tmp_path / "file").touch()
    losses, lost = train(tmp_path / name)
    assert losses == plain
    assert any("nothing is recorded" in loss for loss in lost)


def removed(step: int, watch: tt.Watch, folder: Path) -> None:
    if step == 4:
        watch.flush()
        shutil.rmtree(folder)


def replaced_by_a_file(step: int, watch: tt.Watch, folder: Path) -> None:
    if step == 4:
        watch.flush()
        folder.rename(folder.with_name("elsewhere"))
        folder.touch()


@pytest.mark.parametrize("during", [removed, replaced_by_a_file])
def test_a_folder_that_goes_away_is_told(tmp_path: Path, plain: list[str], during: During) -> None:
    losses, lost = train(tmp_path / "run", during)
    assert losses == plain
    assert lost


def test_no_file_descriptors_are_told(tmp_path: Path, plain: list[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def none_left(step: int, watch: tt.Watch, folder: Path) -> None:
        if step == 2:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))

    try:
        losses, lost = train(tmp_path / "run", none_left)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert losses == plain
    assert any("Too many open files" in loss for loss in lost)


def fork_that_closes(step: int, watch: tt.Watch, folder: Path) -> None:
    if step in (3, 6):
        child = os.fork()
        if child == 0:
            try:
                watch.flush()
                watch.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def signals(step: int, watch: tt.Watch, folder: Path) -> None:
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGUSR1)


def another_thread(step: int, watch: tt.Watch, folder: Path) -> None:
    thread = threading.Thread(target=watch.flush)
    thread.start()
    thread.join()


@pytest.mark.parametrize("during", [fork_that_closes, signals, another_thread])
def test_forks_signals_and_threads_cost_nothing(tmp_path: Path, plain: list[str], during: During) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        losses, lost = train(tmp_path / "run", during)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert losses == plain
    assert lost == []
    run = tt.open(tmp_path / "run")
    assert run.steps().tolist() == list(range(STEPS))
    assert run.problems == []
