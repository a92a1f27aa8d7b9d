"""The pulse against plain torch, and faults by family: a sample of the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.corpus.diagnosis.families import BASES, FAMILIES, run_family
from torch import nn

import torchtap as tt
from torchtap.diagnosis.pulse import SAMPLE, Pulse

SAMPLED = {
    "rate_zero_late": "flat", "same_batch_late": "curve", "moments_lost": "curve", "optimizer_stops": "flat",
    "spike": "curve", "eps_one": "curve", "clipped_to_nothing": "flat", "group_rate_zero": "flat",
    "weights_reloaded": "curve", "own_token": "text", "relu_at_the_end": "curve", "frozen_moves": "flat",
    "slow_norm": "images", "softmax_twice": "flat",
}  # fmt: skip


def pulse_rows(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[dict[str, list[float]], Any]:
    """Train under a pulse; return its columns, and what plain torch computes of the last weight's sample."""
    columns: dict[str, list[float]] = {}

    def take(table: dict[str, list[float]]) -> None:
        for name, values in table.items():
            columns.setdefault(name, []).extend(values)

    names = {id(each): f"p{number}" for number, each in enumerate(model.parameters())}
    count = iter(range(10_000))
    pulse = Pulse([model], names, lambda: next(count), take)
    pulse.start()
    truth = []
    weight = list(model.parameters())[-2]
    for _ in range(steps):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        before, gradient = weight.detach().clone(), weight.grad.clone()  # type: ignore[union-attr]
        optimizer.step()
        change = weight.detach() - before
        truth.append(
            (float(loss), float(gradient.square().mean().sqrt()), float(change.square().mean().sqrt()))
        )
    pulse.stop()
    return columns, truth


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adamw"])
def test_a_row_has_the_loss_the_sizes_and_the_update_that_the_arithmetic_predicts(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    made = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    }
    columns, truth = pulse_rows(model, made[kind](model.parameters()), 20)
    assert model[2].weight.numel() <= SAMPLE
    assert columns["0.loss"] == pytest.approx([each[0] for each in truth], rel=1e-6)
    assert columns["0.0.grad"] == pytest.approx([each[1] for each in truth], rel=1e-5)
    assert columns["0.0.update"] == pytest.approx([each[2] for each in truth], rel=1e-5)
    assert columns["0.0.predicted"] == pytest.approx(columns["0.0.update"], rel=1e-4)
    assert max(columns["0.0.unexplained"]) < 1e-4 * max(columns["0.0.update"])
    assert columns["0.0.moved"] == [1.0] * 20


def test_a_pulse_leaves_the_training_as_it_is() -> None:
    def losses(watched: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        pulse = Pulse([model], {id(p): "p" for p in model.parameters()}, lambda: 0, lambda table: None)
        if watched:
            pulse.start()
        found = []
        for _ in range(12):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            found.append(float(loss))
        pulse.stop()
        return found

    assert losses(True) == losses(False)


@pytest.mark.parametrize("name", sorted(SAMPLED))
def test_a_fault_of_a_family_is_named_first_or_second_and_its_twin_is_healthy(name: str) -> None:
    family = next(each for each in FAMILIES if each.name == name)
    outcome = run_family(family, SAMPLED[name], seed=0)
    assert outcome.place in (1, 2), outcome
    assert outcome.twin == ()


def test_a_finished_run_gives_the_findings_of_the_live_doctor(tmp_path: Path) -> None:
    job = BASES["flat"](0)
    with tt.doctor(job.model, job.optimizer, run=tmp_path / "run", quiet=True) as doctor:
        for step in range(70):
            if step == 40:
                job.optimizer.param_groups[0]["lr"] = 0.0
            x, y = job.batch(step)
            job.optimizer.zero_grad()
            job.loss(job.model(x), y).backward()
            job.optimizer.step()
    live = [(each.kind, each.step) for each in doctor.findings()]
    assert ("rate-zero", 47) in live
    assert [(each.kind, each.step) for each in tt.diagnose(tmp_path / "run")] == live
