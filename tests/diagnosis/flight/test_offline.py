"""``torchtap replay``: the kept step once more, in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchtap as tt

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn, self.drop, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x, scale=1.0):
        h = self.drop(torch.relu(self.bn(self.a(x)))) * scale
        return self.b(h.log())

def make():
    return Net()

def other():
    return nn.Linear(6, 3)

if __name__ == "__main__":
    import torchtap as tt
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with tt.flight_recorder(model, optimizer, "flights") as recorder:
        for step in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(16, 6), scale=0.5), torch.randint(3, (16,)))
            loss.backward()
            optimizer.step()
"""


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flown")
    (folder / "net.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "net.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def replay(folder: Path, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchtap", "replay", "flights/step-00000000", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, input=text)


def test_the_values_come_out_the_same_and_the_birth_is_named(flown: Path) -> None:
    done = replay(flown, "--model", "net.py:make", "--out", "again")
    assert done.returncode == 0, done.stderr
    assert "bit for bit" in done.stdout
    assert "aten.log.default" in done.stdout
    assert "net.py:12 (forward)" in done.stdout
    dump, again = tt.open(flown / "flights" / "step-00000000"), tt.open(flown / "again")
    for site in ("a:output", "drop:output", "b:grad_output", "a:param_grad.weight"):
        mine, theirs = (run.tensor(site, step=0, phase="replay") for run in (again, dump))
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_as_json(flown: Path) -> None:
    facts = json.loads(replay(flown, "--model", "net.py:make", "--json").stdout)
    assert (facts["step"], facts["differing"], facts["birth"]["kind"]) == (0, [], "inf")
    assert facts["compared"] >= 20


def test_the_debugger_stops_in_the_user_s_code(flown: Path) -> None:
    done = replay(flown, "--model", "net.py:make", "--pdb", text="p h.shape\nc\n")
    assert "torch.Size([16, 8])" in done.stdout
    assert "net.py" in done.stdout


def test_another_model_another_name_and_a_run_that_is_no_dump_are_refused(flown: Path) -> None:
    for words, says in (
        (["--model", "net.py:other"], "Error(s) in loading state_dict"),
        (["--model", "G=net.py:make"], "the kept step has the models --model"),
        (["--model", "net.py:make", "--rank", "3"], "no kept moment"),
    ):
        done = replay(flown, *words)
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_a_file_with_code_in_it_is_not_run(flown: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    folder = tmp_path / "flights" / "step-00000000" / "moment"
    folder.mkdir(parents=True)
    torch.save({"format": 1, "step": Evil()}, folder / "rank-0.pt")
    (tmp_path / "net.py").write_text(SCRIPT)
    done = replay(tmp_path, "--model", "net.py:make")
    assert done.returncode == 2
    assert "no kept moment that can be read" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_show_begins_with_the_incident(flown: Path) -> None:
    command = [sys.executable, "-m", "torchtap", "show", "flights/step-00000000"]
    done = subprocess.run(command, cwd=flown, capture_output=True, text=True, check=True)
    assert "step 0 was kept" in done.stdout
    assert "aten.log.default" in done.stdout
    assert "the same numbers" in done.stdout
