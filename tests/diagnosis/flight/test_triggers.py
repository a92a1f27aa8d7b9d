"""When a step is kept and when not; what the recorder holds; that it leaves everything as it found it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchtap as tt
from torchtap.diagnosis.finding import Finding
from torchtap.diagnosis.flight.recorder import Usual

pytestmark = pytest.mark.filterwarnings("ignore:torchtap kept")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class Training:
    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        self.recorder = tt.flight_recorder(self.model, self.optimizer, folder / "flights", **options)

    def step(self, scale: float = 1.0, size: int = 8) -> None:
        loss = scale * F.cross_entropy(self.model(torch.randn(size, 6)), torch.randint(3, (size,)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def kept(self) -> list[tuple[int, str]]:
        return [(each.step, each.trigger) for each in self.recorder.outcomes]


def test_a_healthy_training_leaves_nothing_on_disk(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with training.recorder:
        for step in range(120):
            training.step(scale=1.0 + 0.5 * (step % 7))
    assert training.kept() == []
    assert not (tmp_path / "flights").exists()


def test_memory_has_its_bound_however_long_the_training(tmp_path: Path) -> None:
    training = Training(tmp_path, steps=10, batches=3, batch_bytes=1000)
    sizes = []
    with training.recorder as recorder:
        for step in range(200):
            training.step(size=8 + step % 40)
            sizes.append(recorder.nbytes)
        sites, statistics = 4, 12
        assert max(sizes) <= 10 * sites * statistics * 8 + 1000
        recorder.trigger()
        training.step(size=200)  # larger than the bound by itself
    assert max(sizes[150:]) == max(sizes[50:100])
    assert "did not fit batch_bytes" in " ".join(recorder.outcomes[0].notes)
    assert not recorder.outcomes[0].replayed


def test_one_incident_is_one_dump_until_a_healthy_step_and_dumps_have_a_limit(tmp_path: Path) -> None:
    training = Training(tmp_path, limit=3)
    with training.recorder:
        for step in range(12):
            with torch.no_grad():
                training.model[0].bias[0] = float("nan") if step % 4 else 0.0
            training.step()
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.nan_to_num_()
    assert training.kept() == [(1, "nonfinite"), (5, "nonfinite"), (9, "nonfinite")]


def test_an_error_of_a_rule_keeps_the_step_once_for_each_kind_and_site(tmp_path: Path) -> None:
    training = Training(tmp_path)
    finding = Finding("dead", "error", "1:output", 3, 1.0, "1:output is dead", "look", ("1:output",))
    warning = Finding("dead", "warning", "1:output", 3, 1.0, "1:output is dead", "look", ("1:output",))
    with training.recorder as recorder:
        for _ in range(3):
            training.step()
            recorder.finding(warning)
        recorder.finding(finding)
        recorder.finding(finding)
        training.step()
        training.step()
    assert training.kept() == [(3, "finding")]
    assert tt.open(recorder.dumps[0]).events("incident")[0]["reason"] == "1:output is dead"


def test_a_mask_of_infinities_is_no_incident_and_a_new_one_is(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.eye(8, 3, dtype=torch.bool), float("-inf"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), Masked(), nn.Softmax(-1), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with tt.flight_recorder(model, optimizer, tmp_path) as recorder:
        for step in range(6):
            x = torch.randn(8, 6)
            if step == 4:
                x[3] = float("inf")
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [each.step for each in recorder.outcomes] == [4]
    assert recorder.outcomes[0].birth is not None
    assert recorder.outcomes[0].birth.module == "0"


def test_a_scaler_that_looks_for_its_scale_is_no_incident(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    skipped = 0
    with tt.flight_recorder(model, optimizer, tmp_path) as recorder:
        for _ in range(12):
            loss = 100 * F.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,)))
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
            optimizer.zero_grad()
    assert skipped >= 2
    assert recorder.outcomes == []


def test_a_number_is_unusual_against_its_own_history_only() -> None:
    usual = Usual(10.0, 50)
    assert [usual.judge(value) for value in [5.0] * 10 + [1000.0] + [5.0] * 10][10] is None, (
        "too little was seen"
    )
    usual = Usual(10.0, 50)
    for value in range(40):
        assert usual.judge(3.0 + 0.1 * (value % 5)) is None
    assert usual.judge(float("inf")) is None, "not this one's business"
    limit = usual.judge(50.0)
    assert limit is not None
    assert limit < 10
    assert usual.judge(50.0) is not None, "what is unusual does not become usual"
    assert usual.judge(3.2) is None


def test_signals_and_hooks_of_others_are_called_and_put_back(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    own, hook = signal.getsignal(signal.SIGUSR1), sys.excepthook
    backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale
    try:
        training = Training(tmp_path)
        with training.recorder:
            training.step()
            os.kill(os.getpid(), signal.SIGUSR1)
            training.step()
        assert heard == [signal.SIGUSR1]
        assert training.kept() == [(1, "asked")]
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sys.excepthook is hook
    assert torch.autograd.backward is backward
    assert torch.amp.GradScaler.scale is scale


def test_an_exception_that_ends_the_program_is_kept_without_a_with_block(tmp_path: Path) -> None:
    script = """
import torch, torchtap as tt
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
recorder = tt.flight_recorder(model, optimizer, "flights")
for step in range(5):
    loss = model(torch.full((3, 4), float(step))).sum()
    if step == 3:
        raise KeyError("label 7")
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'label 7'")
    (incident,) = tt.open(tmp_path / "flights" / "step-00000003").events("incident")
    assert (incident["trigger"], incident["reproduced"]) == ("exception", True)
    stored = tt.open(tmp_path / "flights" / "step-00000003").tensor(":input", step=3, phase="replay")
    assert torch.equal(stored, torch.full((3, 4), 3.0))


def test_a_disk_that_cannot_be_written_costs_the_dump_alone(tmp_path: Path) -> None:
    (tmp_path / "flights").write_text("in the way")
    training = Training(tmp_path)
    with training.recorder as recorder, pytest.warns(RuntimeWarning, match="torchtap"):
        recorder.trigger()
        for _ in range(3):
            training.step()
    assert recorder.outcomes == []


def test_a_folder_of_an_earlier_training_is_not_written_over(tmp_path: Path) -> None:
    for _ in range(2):
        training = Training(tmp_path)
        with training.recorder as recorder:
            recorder.trigger()
            training.step()
    names = sorted(path.name for path in (tmp_path / "flights").iterdir())
    assert names == ["step-00000000", "step-00000000-again"]


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "says"),
    [
        (len, None, {}, "nn.Module"),
        ({}, None, {}, "nn.Module"),
        (mlp(), None, {}, "give the optimizer"),
        (mlp(), [], {}, "give the optimizer"),
        (mlp(), torch.optim.SGD([torch.zeros(1)], 0.1), {"steps": 0}, "steps=0"),
        (mlp(), torch.optim.SGD([torch.zeros(1)], 0.1), {"batches": True}, "batches=True"),
    ],
)
def test_what_cannot_be_recorded_is_refused(model: Any, optimizer: Any, options: Any, says: str) -> None:
    with pytest.raises(tt.PlanError, match=says):
        tt.flight_recorder(model, optimizer, "flights", **options)


def test_what_happened_is_told_in_one_warning_and_a_callback(tmp_path: Path) -> None:
    told: list[Path] = []
    training = Training(tmp_path, on_dump=lambda path, outcome: told.append(path))
    with training.recorder as recorder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder.trigger("the engineer wants to see it")
        training.step()
    assert told == recorder.dumps
    assert ["the engineer wants to see it" in str(each.message) for each in caught] == [True]
    assert "1 dumps" in repr(recorder)


def test_a_doctor_beside_the_recorder_has_the_step_after_its_error_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    forgotten = torch.optim.SGD(model[0].parameters(), 0.05)  # the last layer is in no optimizer
    found: list[Finding] = []
    with tt.flight_recorder(model, forgotten, tmp_path / "flights") as recorder:

        def hear(finding: Finding) -> None:
            found.append(finding)
            recorder.finding(finding)

        with tt.doctor(model, forgotten, on_finding=hear, quiet=True):
            for _ in range(6):
                F.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
                forgotten.step()
                model.zero_grad()
    errors = [each for each in found if each.severity == "error"]
    assert [each.trigger for each in recorder.outcomes] == ["finding"] * len(errors)
    assert [each.reason for each in recorder.outcomes] == [each.message for each in errors]
    assert errors
