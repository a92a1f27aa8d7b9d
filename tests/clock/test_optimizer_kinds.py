"""What an optimizer does, keeps and is set to: ``update``, ``optim_state``, ``lr``, against plain torch."""

from __future__ import annotations

import pytest
import torch
from tests.clock.truth import Kept
from torch import Tensor, nn

import torchtap as tt


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[dict[str, Tensor]]) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).pow(2).mean().backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        seen.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
        seen[-1] |= {f"{name} before": value for name, value in before.items()}
        seen[-1] |= {
            f"{name} {key}": value.clone()
            for name, p in model.named_parameters()
            for key, value in optimizer.state[p].items()
        }


def test_updates_have_their_size_their_ratio_and_the_share_of_elements_that_stood_still() -> None:
    torch.manual_seed(0)
    model, kept, seen = mlp(), Kept(), list[dict[str, Tensor]]()
    model[0].weight.register_hook(lambda grad: grad * (torch.arange(6) != 2))  # type: ignore[index,union-attr]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(model, None, "*:update", sinks=[kept]) as watch:
        watch.follow(optimizer)
        train(model, optimizer, seen)
    numbers = kept.numbers()
    for step, by_hand in enumerate(seen):
        for name in ("0.weight", "2.bias"):
            path, leaf = name.split(".")
            recorded = numbers[step, "train", f"{path}:update.{leaf}"]
            change, weight = by_hand[name].double(), by_hand[f"{name} before"].double()
            assert recorded["l2"] == pytest.approx(change.norm().item(), rel=1e-5)
            assert recorded["ratio"] == pytest.approx((change.norm() / weight.norm()).item(), rel=1e-5)
            assert recorded["zeros"] == pytest.approx((change == 0).double().mean().item())
    assert numbers[0, "train", "0:update.weight"]["zeros"] >= 1 / 6


def test_what_an_optimizer_keeps_is_read_after_its_update() -> None:
    torch.manual_seed(0)
    model, kept, seen = mlp(), Kept(), list[dict[str, Tensor]]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with tt.watch(model, None, "*:optim_state", sinks=[kept]) as watch:
        watch.follow(optimizer)
        train(model, optimizer, seen)
    numbers = kept.numbers()
    for step, by_hand in enumerate(seen):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            recorded = numbers[step, "train", f"0:optim_state.weight.{key}"]
            assert recorded["mean"] == pytest.approx(
                by_hand[f"0.weight {key}"].double().mean().item(), rel=1e-5
            )


def test_learning_rates_are_those_of_the_update() -> None:
    model, kept = mlp(), Kept()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]  # type: ignore[index]
    optimizer = torch.optim.SGD(groups, 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with tt.watch(model, None, ":lr", sinks=[kept]) as watch:
        watch.follow(optimizer)
        for _ in range(3):
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            schedule.step()
    numbers = kept.numbers()
    assert [numbers[step, "train", ":lr.0"]["value"] for step in range(3)] == pytest.approx(
        [0.1, 0.05, 0.025]
    )
    assert [numbers[step, "train", ":lr.1"]["value"] for step in range(3)] == pytest.approx(
        [0.5, 0.25, 0.125]
    )


def test_recording_updates_changes_no_training() -> None:
    def losses(taps: list[str]) -> list[float]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        with tt.watch(model, None, taps) as watch:
            watch.follow(optimizer)
            train(model, optimizer, [])
        return [p.sum().item() for p in model.parameters()]

    assert losses(["*:update", "*:optim_state", ":lr"]) == losses(["0:output"])


def test_without_an_optimizer_coverage_says_why_nothing_came() -> None:
    model = mlp()
    with tt.watch(model, None, ["0:update", ":lr"]) as watch, watch.step():
        model(torch.ones(1, 6)).sum().backward()
    reasons = {missing.site: missing.reason for missing in watch.coverage()}
    assert "no optimizer" in reasons["0:update.weight"]
    assert "no optimizer" in reasons[":lr"]
