"""No silent gap: what happens to a model under watch is noticed at the next step and told once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtap as tt


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))


def train(watch: tt.Watch, made: nn.Module, steps: int = 2) -> None:
    for _ in range(steps):
        with watch.step():
            made(torch.randn(3, 4)).sum().backward()


def added(made: nn.Sequential) -> None:
    made.append(nn.Linear(2, 2))


def added_deep(made: nn.Sequential) -> None:
    made[2].add_module("more", nn.Linear(4, 4))  # type: ignore[operator]


def added_to_one_without_children(made: nn.Sequential) -> None:
    made[1].add_module("inner", nn.Linear(4, 4))  # type: ignore[operator]


def replaced(made: nn.Sequential) -> None:
    made[3] = nn.Linear(4, 2)


def replaced_deep(made: nn.Sequential) -> None:
    made[2][0] = nn.Linear(4, 4)  # type: ignore[index]


def removed(made: nn.Sequential) -> None:
    del made[3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (added, "came after the watch"),
        (added_deep, "came after the watch"),
        (added_to_one_without_children, "came after the watch"),
        (replaced, "gone or were replaced"),
        (replaced_deep, "gone or were replaced"),
        (removed, "gone or were replaced"),
    ],
)
def test_a_changed_model_is_noticed_at_the_next_step_and_told_once(
    tmp_path: Path, change: Callable[[nn.Sequential], None], words: str
) -> None:
    made = model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.watch(made, tmp_path / "run", ["*:output"]) as watch:
            train(watch, made)
            assert not watch.lost
            change(made)
            train(watch, made, 3)
            assert sum(words in loss for loss in watch.lost) == 1, watch.lost
    assert any(words in problem for problem in tt.open(tmp_path / "run").problems)


@pytest.mark.parametrize("which", ["_forward_hooks", "_forward_pre_hooks"])
def test_hooks_that_others_cleared_are_told_and_put_on_again(tmp_path: Path, which: str) -> None:
    made = model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.watch(made, tmp_path / "run", ["*:output", "*:input"]) as watch:
            train(watch, made)
            for module in made.modules():
                getattr(module, which).clear()
            train(watch, made, 3)
            assert sum("removed the hooks" in loss for loss in watch.lost) == 1, watch.lost
    run = tt.open(tmp_path / "run")
    assert run.series("3:output", "mean").steps.tolist() == [0, 1, 2, 3, 4]
    assert any("removed the hooks" in problem for problem in run.problems)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in made.modules())


def test_a_change_that_no_tap_asks_about_is_no_loss(tmp_path: Path) -> None:
    made = model()
    with tt.watch(made, tmp_path / "run", ["0:output"]) as watch:
        train(watch, made)
        added(made)
        train(watch, made)
        assert not watch.lost


@pytest.mark.parametrize("via", ["hook", "wrap", "forward"])
def test_our_own_taps_are_never_taken_for_a_change(tmp_path: Path, via: str) -> None:
    made = model()
    taps = [tt.tap("*:output", every=2), tt.tap("0:grad_output", every=3)]
    with tt.watch(made, tmp_path / "run", taps, via=via) as watch:  # type: ignore[arg-type]
        train(watch, made, 7)
        assert not watch.lost


def test_a_strict_watch_raises() -> None:
    made = model()
    watch = tt.watch(made, None, ["*:output"], strict=True)
    try:
        train(watch, made)
        added(made)
        with pytest.raises(tt.RecordingLostError, match="came after the watch"):
            train(watch, made)
    finally:
        watch.close()
