"""A doctor beside a training: it changes nothing, tells while it trains, and leaves no trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchtap as tt
from torchtap.diagnosis.chart import Chart
from torchtap.diagnosis.finding import Finding
from torchtap.diagnosis.rule_type import Rule, rule
from torchtap.diagnosis.rules import stale_gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2)))


def train(steps: int = 25, *, forget: bool = False, **options: Any) -> tuple[list[float], tt.Doctor | None]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    doctor = tt.doctor(model, optimizer, **options) if options else None
    losses = []
    try:
        for _ in range(steps):
            ids = torch.randint(0, 20, (8, 12))
            if not forget:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(ids).flatten(0, 1), torch.randint(0, 20, (96,)))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    finally:
        if doctor is not None:
            doctor.close()
    losses += [float(each.detach().sum()) for each in model.state_dict().values()]
    return losses, doctor


def test_losses_weights_and_random_numbers_are_what_they_are_without_it(tmp_path: Path) -> None:
    alone, _ = train()
    after = torch.rand(4)
    watched, doctor = train(run=tmp_path / "run", quiet=True)
    assert alone == watched
    assert torch.equal(after, torch.rand(4))
    assert doctor is not None
    assert [each for each in doctor.findings() if each.severity != "info"] == []


def test_torch_is_left_as_it_was() -> None:
    before = [
        (torch.autograd, "backward"),
        (torch, "softmax"),
        (F, "dropout"),
        (F, "scaled_dot_product_attention"),
        (DataLoader, "__iter__"),
        (torch.amp.GradScaler, "scale"),
    ]
    were = [getattr(owner, name) for owner, name in before]
    train(4, quiet=True)
    assert [getattr(owner, name) for owner, name in before] == were
    assert "softmax" not in vars(torch.Tensor)


def test_a_finding_is_told_once_to_everybody_while_it_trains(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Sink:
        alerts: ClassVar[list[tuple[Any, ...]]] = []

        def write(self, record: Any) -> None: ...

        def alert(self, *words: Any) -> None:
            self.alerts.append(words)

        def close(self) -> None: ...

    heard: list[Finding] = []
    train(forget=True, run=tmp_path / "run", sinks=[Sink()], on_finding=heard.append)
    assert [each.kind for each in heard if each.severity == "error"] == ["stale-gradient"]
    level, title, text, step, site = Sink.alerts[0]
    assert (level, title, step) == ("error", "stale-gradient", 1)
    assert site.endswith("param_grad.weight")
    assert text
    assert capsys.readouterr().err.count("stale-gradient") == 1


def test_the_finished_run_says_what_the_doctor_said(tmp_path: Path) -> None:
    _, doctor = train(forget=True, run=tmp_path / "run", quiet=True)
    assert doctor is not None
    live = [(each.kind, each.severity, each.site, each.step, each.message) for each in doctor.findings()]
    again = tt.diagnose(tmp_path / "run")
    assert [(each.kind, each.severity, each.site, each.step, each.message) for each in again] == live
    assert again.unjudged == doctor.findings().unjudged


def test_it_stops_the_training_when_asked_and_before_the_next_update() -> None:
    with pytest.raises(tt.TrainingStoppedError, match=r"never set back.*zero_grad"):
        train(forget=True, stop="error", quiet=True)
    train(6, stop="error", quiet=True)  # a healthy one goes on
    with pytest.raises(tt.PlanError, match="stop='never'"):
        train(stop="never", quiet=True)
    with pytest.raises(tt.PlanError, match="give the optimizer"):
        tt.doctor(Net())


@rule("broken", concludes="Nothing.", wrong_if="Always.", causes=("itself",), fix="remove it")
def broken(rule: Rule, chart: Chart) -> Iterable[Finding]:
    raise ZeroDivisionError("a rule of mine")


def test_a_rule_that_raises_costs_itself_only(tmp_path: Path) -> None:
    _, doctor = train(forget=True, run=tmp_path / "run", rules=[broken, stale_gradient], quiet=True)
    assert doctor is not None
    found = doctor.findings()
    assert [each.kind for each in found] == ["stale-gradient"]
    assert [str(each) for each in found.unjudged] == ["broken: it raised ZeroDivisionError: a rule of mine"]
    again = tt.diagnose(tmp_path / "run", rules=[broken, stale_gradient])
    assert again.unjudged == found.unjudged


def test_between_live_steps_the_model_has_no_tap() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.doctor(model, optimizer, dense=2, every=10, share=None, quiet=True) as doctor:
        live = []
        for _ in range(24):
            live.append(doctor.live)
            assert bool(model[0]._forward_hooks) == doctor.live
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    assert [step for step, yes in enumerate(live) if yes] == [0, 1, 11, 21]
    assert not model[0]._forward_hooks


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    nn.functional.cross_entropy(model(torch.randn(32, 8)), torch.randint(0, 2, (32,))).backward()
    optimizer.step()
"""


def test_a_script_that_knows_nothing_of_it_is_diagnosed_while_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "torchtap", "run", "--doctor", "--out", str(tmp_path / "run"), str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torchtap: stale-gradient: error" in done.stderr
    assert tt.diagnose(tmp_path / "run")[0].kind == "stale-gradient"
