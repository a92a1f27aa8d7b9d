"""Random scripts without torchtap: several trainings, whose models and optimizers come at any time."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchtap as tt
from torchtap.integrations.zero_code.recording import TrainingRecording, begin

SITES = ["*:output", "*:param", "*:param_grad", "*:update"]
Expected = dict[tuple[int, str], Tensor]  # step and site, without the model's name


class Script:
    """A script with random trainings. It notes what plain hooks see."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.step = 0
        self.updates = 0
        self.seen: Expected = {}
        self.losses: dict[int, float] = {}
        self.kept: list[nn.Module] = []

    def run(self) -> None:
        torch.manual_seed(0)
        for number in range(self.pick.randint(1, 4)):
            again = bool(self.kept) and self.pick.random() < 0.4
            model = self.kept[-1] if again else self.made(number)
            self.kept.append(model)
            self.train(model)
            if self.pick.random() < 0.3:
                self.kept.clear()  # a model that is gone, as in a fold

    def made(self, number: int) -> nn.Module:
        wide = 3 + number
        return nn.Sequential(nn.Linear(4, wide), nn.Tanh(), nn.Linear(wide, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind = self.pick.choice(["sgd", "adam", "closure", "head"])
        self.closure = kind == "closure"
        parameters = list(model.parameters())
        if kind == "head":
            return torch.optim.SGD(parameters[-2:], 0.1)
        return torch.optim.Adam(parameters, 0.01) if kind == "adam" else torch.optim.SGD(parameters, 0.1)

    def train(self, model: nn.Module) -> None:
        optimizer = self.optimizer(model)
        micro = self.pick.choice([1, 1, 2])
        for _ in range(self.pick.randint(1, 4)):
            optimizer.zero_grad()
            before = {name: each.detach().clone() for name, each in model.named_parameters()}
            outputs: list[Tensor] = []
            losses: list[float] = []

            def closure() -> Tensor:
                loss = torch.zeros(())
                for _ in range(micro):
                    output = model(torch.randn(3, 4))
                    loss = output.pow(2).mean() / micro
                    loss.backward()
                    outputs.append(output.detach())  # noqa: B023
                    losses.append(loss.item())  # noqa: B023
                return loss

            if self.closure:
                optimizer.step(closure)  # type: ignore[arg-type]
            else:
                closure()
                optimizer.step()
            held = {id(each) for group in optimizer.param_groups for each in group["params"]}
            self.note(model, outputs, before, held)
            self.losses[self.step] = math.fsum(losses)
            self.step += 1
        if self.pick.random() < 0.5:
            model.eval()
            with torch.no_grad():
                model(torch.randn(5, 4))
            model.train()

    def note(
        self, model: nn.Module, outputs: list[Tensor], before: dict[str, Tensor], held: set[int]
    ) -> None:
        self.seen[self.step, "2:output"] = torch.cat(outputs)
        for name, each in model.named_parameters():
            path, leaf = name.split(".")
            self.seen[self.step, f"{path}:param.{leaf}"] = before[name]
            if each.grad is not None:
                self.seen[self.step, f"{path}:param_grad.{leaf}"] = each.grad.detach().clone()
            if id(each) in held:
                self.seen[self.step, f"{path}:update.{leaf}"] = each.detach() - before[name]


def differences(script: Script, run: tt.Run) -> list[str]:
    """Return what the run has otherwise than plain hooks saw it. A site's last components name it in every model."""
    found: dict[tuple[int, str], list[float]] = {}
    for site in run.sites():
        path, _, kind = site.partition(":")
        if not path or kind.startswith("value"):
            continue
        series = run.series(site, "l2", phase="train")
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            found.setdefault((step, f"{path.split('.')[-1]}:{kind}"), []).append(value)
    wrong = []
    for key, value in script.seen.items():
        norm = value.double().norm().item()
        if not any(math.isclose(each, norm, rel_tol=1e-5, abs_tol=1e-7) for each in found.get(key, [])):
            wrong.append(f"{key}: {found.get(key)} instead of {norm}")
    losses = run.series("loss")
    recorded = dict(zip(losses.steps.tolist(), losses.values.tolist(), strict=True))
    if recorded.keys() != script.losses.keys() or any(
        not math.isclose(recorded[step], loss, rel_tol=1e-5) for step, loss in script.losses.items()
    ):
        wrong.append(f"losses {recorded} instead of {script.losses}")
    if run.steps().tolist() != list(range(script.step)):
        wrong.append(f"steps {run.steps().tolist()} instead of {script.step}")
    return wrong + run.problems


def record(script: Script, folder: Path) -> TrainingRecording:
    taps = [{"select": SITES, "every": 1}]
    recording = begin(json.dumps({"out": str(folder), "tap": taps}))
    try:
        script.run()
    finally:
        recording.end()
    return recording


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(12))
def test_every_training_of_a_script_has_its_own_steps_and_numbers(seed: int, tmp_path: Path) -> None:
    plain, script = Script(seed), Script(seed)
    plain.run()
    record(script, tmp_path / "run")
    assert differences(plain, tt.open(tmp_path / "run")) == []
    assert script.losses == plain.losses
