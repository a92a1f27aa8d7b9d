"""No silent gap: what happens to a model under watch is noticed at the next step and told once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

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


@pytest.mark.parametrize("way", ["hook", "wrap", "forward"])
def test_our_own_taps_are_never_taken_for_a_change(tmp_path: Path, way: str) -> None:
    made = model()
    taps = [tt.tap("*:output", every=2), tt.tap("0:grad_output", every=3)]
    with tt.watch(made, tmp_path / "run", taps, way=way) as watch:  # type: ignore[arg-type]
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


def test_the_sites_that_are_gone_are_named_and_no_others(tmp_path: Path) -> None:
    made = model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.watch(made, tmp_path / "run", ["0:output", "3:output"]) as watch:
            train(watch, made)
            removed(made)
            train(watch, made)
            (told,) = watch.lost
    assert "3:output" in told
    assert "0:output" not in told


# -- the taps follow the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["hook", "wrap", "forward"])
@pytest.mark.parametrize("change", [added, added_deep, replaced, replaced_deep, removed])
def test_taps_follow_a_changed_model_from_the_next_step_on(
    tmp_path: Path, change: Callable[[nn.Sequential], None], way: str
) -> None:
    made = model()
    kinds = ["*:output", "*:grad_output", "*:param", "*:param_grad"]
    given, expected = torch.randn(3, 4), {}
    with tt.watch(made, tmp_path / "run", kinds, way=way, follow_model=True) as watch:  # type: ignore[arg-type]
        for step in range(6):
            if step == 3:
                change(made)
            with watch.step():
                made.zero_grad()
                made(given).sum().backward()
            for path, module in made.named_modules():
                if (
                    path
                    and not isinstance(module, nn.Sequential)
                    and (weight := getattr(module, "weight", None)) is not None
                ):
                    if weight.grad is not None:
                        expected[f"{path}:param_grad.weight", step] = weight.grad.norm().item()
                    expected[f"{path}:param.weight", step] = weight.norm().item()
        assert watch.lost == []
        assert not [
            each for each in watch.coverage() if "2.more" not in each.site and "inner" not in each.site
        ]
    run = tt.open(tmp_path / "run")
    found = {
        (site, int(step)): float(value)
        for site in run.sites()
        if ":param" in site and site.endswith("weight")
        for step, value in zip(*run.series(site, "l2"), strict=True)
    }
    assert found.keys() == expected.keys()
    assert all(abs(found[key] - expected[key]) < 1e-5 * (1 + expected[key]) for key in found)
    assert not [problem for problem in run.problems if "lost" in problem]
    (event,) = run.events("model")
    assert bool(event["came"] or event["gone"]) == (change not in (replaced, replaced_deep))


def test_what_follows_the_model_keeps_budget_phase_and_clock(tmp_path: Path) -> None:
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    taps = [tt.tap("*:output", keep=tt.Full(), budget=tt.Budget(bytes=4000)), tt.tap("*:output", every=2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.watch(made, tmp_path / "run", taps, follow_model=True).follow(optimizer):
            for step in range(8):
                if step in (2, 5):
                    made.append(nn.Linear(2, 2))
                    optimizer.add_param_group({"params": made[-1].parameters()})
                made.train()
                made(torch.randn(3, 4)).sum().backward()
                optimizer.step()
                made.eval()
                with torch.no_grad():
                    made(torch.randn(3, 4))
    run = tt.open(tmp_path / "run")
    assert run.steps().tolist() == list(range(8))
    assert run.series("4:output", "mean").steps.tolist() == [2, 4, 6]
    assert run.series("4:output", "mean", phase="eval").steps.tolist()[0] in (2, 4)
    assert sum(ref.nbytes for ref in run.tensors()) <= 4000
    assert any("has kept" in problem for problem in run.problems)


def test_a_model_whose_taps_no_longer_fit_is_told_and_trains_on(tmp_path: Path) -> None:
    made = model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taps = [tt.tap("re:.*head:output|0:output", alias="first"), tt.tap("*:output")]
        with tt.watch(made, tmp_path / "run", taps, follow_model=True) as watch:
            train(watch, made)
            made.add_module("head", nn.Linear(2, 2))
            train(watch, made, 3)
            assert sum("do not fit" in loss for loss in watch.lost) == 1, watch.lost
    assert tt.open(tmp_path / "run").series("0:output", "mean").steps.tolist() == [0, 1, 2, 3, 4]


# -- parameters ---------------------------------------------------------------------------------------------------


def test_a_replaced_parameter_is_read_before_the_update_as_its_predecessor_was(tmp_path: Path) -> None:
    made = nn.Linear(4, 2)
    expected = []
    with tt.watch(made, tmp_path / "run", ["*:param", "*:update"]) as watch:
        for step in range(4):
            if step == 2:
                made.weight = nn.Parameter(torch.randn(2, 4))
            optimizer = torch.optim.SGD(made.parameters(), 0.5)
            with watch.step():
                made(torch.ones(3, 4)).sum().backward()
                expected.append(made.weight.norm().item())
                optimizer.step()
        assert watch.lost == []
    run = tt.open(tmp_path / "run")
    assert run.series(":param.weight", "l2").values.tolist() == pytest.approx(expected)
    assert run.series(":update.weight", "l2").steps.tolist() == [0, 1, 2, 3]


def test_a_parameter_that_comes_later_is_told(tmp_path: Path) -> None:
    made = nn.Linear(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.watch(made, tmp_path / "run", ["*:param"]) as watch:
            for step in range(3):
                if step == 1:
                    prune.l1_unstructured(made, "weight", amount=0.5)
                with watch.step():
                    made(torch.ones(3, 4)).sum().backward()
            assert any("weight_orig" in loss for loss in watch.lost), watch.lost


def test_a_parameter_of_a_module_that_had_none_is_followed(tmp_path: Path) -> None:
    made = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with tt.watch(made, tmp_path / "run", ["*:param"], follow_model=True) as watch:
        for step in range(4):
            if step == 1:
                made[1].register_parameter("slope", nn.Parameter(torch.ones(3)))
            with watch.step():
                made(torch.ones(3, 4)).sum().backward()
        assert watch.lost == []
    assert tt.open(tmp_path / "run").series("1:param.slope", "l1").steps.tolist() == [1, 2, 3]


def test_buffers_that_a_model_makes_anew_each_step_are_no_change(tmp_path: Path) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.mean = self.mean * 0.9 + value.mean(0) * 0.1
            return value - self.mean

    made = nn.Sequential(Running(), nn.Linear(4, 2))
    with tt.watch(made, tmp_path / "run", ["*:buffer"]) as watch:
        bound = watch.plan
        train(watch, made, 4)
        assert watch.plan is bound
        assert watch.lost == []


# -- other threads ------------------------------------------------------------------------------------------------


def test_calls_of_another_thread_are_told_once_and_disturb_nothing(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    made = nn.Sequential(shared, nn.ReLU(), shared)

    def meet(module: nn.Module, args: object, output: object) -> None:
        """In the middle of the training's pass, another thread's begins and ends."""
        if threading.current_thread() is threading.main_thread() and watch.step_number == 1:
            thread = threading.Thread(target=made, args=(torch.full((1, 4), 9.0),))
            thread.start()
            thread.join()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.watch(made, tmp_path / "run", ["*:output"]) as watch:
            made[1].register_forward_hook(meet)
            expected = []
            for _ in range(4):
                with watch.step():
                    given = torch.randn(3, 4)
                    expected.append(made(given).mean().item())
            assert sum("other threads" in loss for loss in watch.lost) == 1, watch.lost
            assert watch.passes == 4
    run = tt.open(tmp_path / "run")
    assert run.series("0:output#1", "mean").values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_a_capture_says_that_another_thread_called_the_model() -> None:
    made = model()

    def elsewhere() -> None:
        thread = threading.Thread(target=made, args=(torch.randn(1, 4),))
        thread.start()
        thread.join()

    with pytest.warns(RuntimeWarning, match="all_threads=True"), tt.capture(made, "0:output") as seen:
        made(torch.ones(2, 4))
        elsewhere()
    assert seen["0:output"].shape == (2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tt.capture(made, "0:output", all_threads=True) as seen:
            elsewhere()
    assert seen["0:output"].shape == (1, 4)
