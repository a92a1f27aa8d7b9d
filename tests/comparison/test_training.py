"""Two trainings: the cause is named before its effects, at the step at which it happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtap as tt

STEPS = 6
AT = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(20, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.tok(tokens))))


def trained(folder: Path, change: str = "", keep: Any = None, steps: int = STEPS) -> Path:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = keep or tt.Full()
    taps = [tt.tap(f"*:{kind}", keep=kept) for kind in ("output", "param_grad", "param")]
    with tt.watch(model, folder, taps) as watch:
        for step in range(steps):
            if step >= AT and change == "learning rate":
                optimizer.param_groups[0]["lr"] = 0.2
            if step >= AT and change == "weight decay":
                optimizer.param_groups[0]["weight_decay"] = 0.1
            if step == AT and change == "frozen":
                model.hidden.weight.requires_grad_(False)
            tokens = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(step))
            with watch.step():
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                if step >= AT and change == "loss":
                    loss = loss * 1.5
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return folder


def test_the_same_training_twice_is_the_same(tmp_path: Path) -> None:
    result = tt.compare(trained(tmp_path / "a"), trained(tmp_path / "b"))
    assert result.outcome == "same"
    assert f"{STEPS} steps" in result.verdict


def test_a_doubled_learning_rate_is_told_as_a_factor_of_every_update(tmp_path: Path) -> None:
    result = tt.compare(trained(tmp_path / "a"), trained(tmp_path / "b", "learning rate"))
    assert result.outcome == "differs"
    assert result.first is not None
    assert (result.first.origin, result.first.step) == ("update", AT)
    assert f"From step {AT} on every update (of all 5 parameters) is 2 × the reference's" in result.verdict


def test_weight_decay_is_told_as_a_share_of_the_parameters(tmp_path: Path) -> None:
    result = tt.compare(trained(tmp_path / "a"), trained(tmp_path / "b", "weight decay"))
    assert result.first is not None
    assert result.first.step == AT
    assert "− 0.01 × the parameter (weight decay)" in result.verdict


def test_from_statistics_the_update_is_still_what_differs(tmp_path: Path) -> None:
    a, b = trained(tmp_path / "a", keep=tt.Stats()), trained(tmp_path / "b", "learning rate", keep=tt.Stats())
    result = tt.compare(a, b)
    assert result.first is not None
    assert (result.first.origin, result.first.step) == ("update", AT)


def test_a_gradient_that_became_none_is_named_at_its_step(tmp_path: Path) -> None:
    result = tt.compare(trained(tmp_path / "a"), trained(tmp_path / "b", "frozen"))
    assert result.first is not None
    assert (result.first.step, result.first.site) == (AT, "hidden:param_grad.weight")
    assert "From step 3 on the gradient of `hidden.weight` is missing in the target" in result.verdict


def test_another_loss_shows_in_the_gradients_before_the_parameters(tmp_path: Path) -> None:
    result = tt.compare(trained(tmp_path / "a"), trained(tmp_path / "b", "loss"))
    assert result.first is not None
    assert result.first.step == AT
    assert ":param_grad." in result.first.site
    assert "1.5 × the reference's" in result.verdict


@pytest.mark.parametrize("steps", [2, 4])
def test_a_training_with_fewer_steps_cannot_be_the_same(tmp_path: Path, steps: int) -> None:
    whole, short = trained(tmp_path / "a"), trained(tmp_path / "b", steps=steps)
    result = tt.compare(whole, short)
    assert result.outcome == "cannot tell"
    assert f"{STEPS - steps} steps are not in the other recording" in result.verdict
    assert tt.compare(whole, short, steps=[0, 1]).outcome == "same"


class Unsorted(nn.Module):
    """Its modules are made in another order than they are called in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 20)
        self.hidden = nn.Linear(8, 8)
        self.tok = nn.Embedding(20, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.tok(tokens))))


def logging_run(folder: Path, change: str = "", steps: int = 3) -> Path:
    """A training that logs its loss as people do, after the update."""
    torch.manual_seed(0)
    model = Unsorted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if change == "hidden":
        model.hidden.register_forward_hook(lambda module, given, out: out * 1.02)
    kinds = ("output", "grad_output", "param_grad", "param")
    with tt.watch(model, folder, [tt.tap(f"*:{kind}", keep=tt.Stats()) for kind in kinds]) as watch:
        watch.follow(optimizer)
        for step in range(steps):
            tokens = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss = loss * 1.5 if change == "loss" and step == 2 else loss
            loss.backward()
            optimizer.step()
            watch.log(loss=loss)
    return folder


def test_a_logged_loss_is_an_effect_of_the_outputs_and_not_their_cause(tmp_path: Path) -> None:
    result = tt.compare(logging_run(tmp_path / "a"), logging_run(tmp_path / "b", "hidden"))
    assert result.first is not None
    assert (result.first.step, result.first.site) == (0, "hidden:output")
    order = [row.site for row in result.rows]
    places = [
        order.index(site)
        for site in ("tok:output", "hidden:output", "head:output", ":value.loss", "head:grad_output")
    ]
    assert places == sorted(places)
    assert "before agree" not in result.verdict  # there is no step before


def test_a_loss_that_alone_differs_is_named_before_its_gradients(tmp_path: Path) -> None:
    result = tt.compare(logging_run(tmp_path / "a"), logging_run(tmp_path / "b", "loss"))
    assert result.first is not None
    assert (result.first.step, result.first.site) == (2, ":value.loss")
    assert "At step 2, the logged loss is the first to differ" in result.verdict
    assert "the 2 steps before agree" in result.verdict


def _run_with_optimizer(
    folder: Path, change: Callable[[int, torch.optim.Optimizer, nn.Module], None]
) -> Path:
    """A training whose updates, optimizer states, rate and loss are recorded, and its parameters are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    kinds = ("*:output", "*:param_grad", "*:update", "*:optim_state", "*:lr")
    with tt.watch(model, folder, [tt.tap(kind, keep=tt.Full()) for kind in kinds]) as watch:
        for step in range(5):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            with watch.step():
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                change(step, optimizer, model)
                optimizer.step()
                watch.log(loss=float(loss), seconds=time.perf_counter())
    return folder


def _nothing(step: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    pass


def _double_rate(step: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if step == 3:
        optimizer.param_groups[0]["lr"] *= 2


def _clipped(step: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if step >= 2:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 0.25


def _other_beta(step: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if step == 2:
        optimizer.param_groups[0]["betas"] = (0.5, 0.999)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_double_rate, "From step 3 on the learning rate is another: 0.02, in the reference 0.01"),
        (_clipped, "From step 2 on every gradient (of all 4 parameters) is 0.25 × the reference's"),
        (_other_beta, "exp_avg"),
    ],
)
def test_what_an_optimizer_recorded_is_compared_causes_first(
    change: Callable[[int, torch.optim.Optimizer, nn.Module], None], words: str, tmp_path: Path
) -> None:
    reference = _run_with_optimizer(tmp_path / "a", _nothing)
    result = tt.compare(reference, _run_with_optimizer(tmp_path / "b", change))
    assert result.outcome == "differs"
    assert words in result.verdict


def test_a_logged_loss_is_compared_and_a_time_is_not(tmp_path: Path) -> None:
    reference = _run_with_optimizer(tmp_path / "a", _nothing)
    result = tt.compare(reference, _run_with_optimizer(tmp_path / "b", _nothing))
    assert result.outcome == "same"
    assert result.row(":value.loss").status == "equal"
    assert not [row.site for row in result.rows if "seconds" in row.site]


def test_steps_that_recorded_little_do_not_hide_what_the_others_agreed_on(tmp_path: Path) -> None:
    def run(folder: Path) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tt.watch(model, folder, every=3).follow(optimizer) as watch:
            for _ in range(5):  # the last step is off schedule and has the loss alone
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4)).pow(2).mean()
                loss.backward()
                optimizer.step()
                watch.log(loss=loss)
        return folder

    result = tt.compare(run(tmp_path / "a"), run(tmp_path / "b"))
    assert result.outcome == "same"
    assert {row.site for row in result.rows} >= {"0:output", "1:output", "2:output", ":output", ":value.loss"}
    assert f"all {len(result.rows)} compared sites" in result.verdict
    assert "over 5 steps" in result.verdict
