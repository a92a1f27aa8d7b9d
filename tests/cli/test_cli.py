"""The command line as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtap as tt
from torchtap.cli import main


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def torchtap(capfd: pytest.CaptureFixture[str]) -> Command:
    """The command, in this process: most of a new one's time would go into importing torch."""

    def run(*words: object) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        return Done(int(stop.value.code or 0), out, err)

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    taps = [tt.tap("*:output"), tt.tap("0:output", tt.Full(), every=2), tt.tap("*:grad_output")]
    with tt.watch(model, folder, taps) as watch:
        for _ in range(5):
            with watch.step():
                model(torch.randn(3, 4))
    return folder


def test_show_prints_the_statistics_and_needs_no_torch(run: Path) -> None:
    program = (
        "import sys; from torchtap.cli import main\n"
        "try: main(['show', sys.argv[1]])\n"
        "finally: assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0:output" in done.stdout
    assert "5 (0 to 4)" in done.stdout


def test_show_lists_tensors_coverage_and_json(torchtap: Command, run: Path) -> None:
    assert "3×4" in torchtap("show", run, "--tensors").stdout
    coverage = torchtap("show", run, "--coverage").stdout
    assert "grad_output" in coverage
    assert "backward" in coverage
    facts = json.loads(torchtap("show", run, "--json").stdout)
    assert facts["steps"] == {"count": 5, "first": 0, "last": 4}
    assert facts["tensors"] == 3


def test_show_of_a_phase_has_the_sites_of_that_phase_alone(torchtap: Command, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    taps = [
        "*:output",
        "*:param_grad",
        tt.tap("0:output", tt.Full(), phase="eval"),
        tt.tap("1:input", tt.Full()),
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.watch(model, tmp_path / "run", taps).follow(optimizer) as watch:
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            watch.log(loss=1.0)
        model.eval()
        with torch.no_grad():
            model(torch.randn(3, 4))
    training = torchtap("show", tmp_path / "run").stdout
    assert "loss" in training
    assert "param_grad.weight" in training
    assert "kept as tensors alone: 1; --tensors lists them" in training
    evaluation = torchtap("show", tmp_path / "run", "--phase", "eval").stdout
    assert "0:output" in evaluation
    assert "param_grad" not in evaluation
    assert "│ loss" not in evaluation


def test_a_long_name_keeps_its_end() -> None:
    from torchtap.viewer.terminal import cut_in_the_middle

    assert cut_in_the_middle("blocks.0.attn:param_grad.weight", 16) == "blocks.…d.weight"
    assert cut_in_the_middle("0:output", 8) == "0:output"


@pytest.mark.parametrize("target", ["parquet", "hdf5", "pt", "npz", "csv", "jsonl"])
def test_export_writes_what_it_says(torchtap: Command, run: Path, target: str, tmp_path: Path) -> None:
    done = torchtap("export", run, "--to", target, "-o", tmp_path / f"out.{target}")
    assert done.returncode == 0, done.stderr
    written = Path(done.stdout.strip().splitlines()[-1])
    assert written.exists()


def test_sites_of_a_factory_a_script_and_a_file(
    torchtap: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "mine.py"
    script.write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(2, 3), nn.ReLU())\n"
    )
    from_script = torchtap("sites", f"{script}:make", "--plain", "--kind", "output")
    assert from_script.stdout.split() == [":output", "0:output", "1:output"]
    from_module = torchtap("sites", "mine:make", "--plain", "--kind", "param")
    assert from_module.stdout.split() == ["0:param.weight", "0:param.bias"]
    scripted = tmp_path / "scripted.pt"
    torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.ReLU())).save(str(scripted))
    assert "0:output" in torchtap("sites", scripted, "--plain").stdout.split()
    whole = tmp_path / "whole.pt"
    torch.save(nn.Linear(2, 2), whole)
    refused = torchtap("sites", whole)
    assert refused.returncode == 2
    assert "--unsafe" in refused.stderr
    assert ":param.weight" in torchtap("sites", whole, "--plain", "--unsafe").stdout.split()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["show", "nowhere"], "there is no run at nowhere"),
        (["sites", "nothing"], "names no model"),
        (["sites", "no.such.module:f"], "cannot import"),
        (["sites", "torch.nn:Linear"], "cannot be called without arguments"),
        (["sites", "missing.pt"], "there is no file"),
        (["bogus"], "there is no command 'bogus'"),
        (["shwo"], "did you mean 'show'"),
        (["view", "x", "--port", "99999"], "0<=x<=65535"),
        (["export", "nowhere", "--to", "csv"], "there is no run"),
    ],
)
def test_errors_have_a_sentence_and_no_traceback(torchtap: Command, words: list[str], says: str) -> None:
    done = torchtap(*words)
    assert done.returncode == 2
    assert says in done.stderr
    assert "torchtap: " in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(torchtap: Command) -> None:
    assert "Traceback" in torchtap("--debug", "show", "nowhere").stderr


def test_the_demo_trains_and_leaves_a_run(
    torchtap: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = torchtap("demo", "--steps", 4)
    assert done.returncode == 0, done.stderr
    assert "loss after 4 steps" in done.stdout
    opened = tt.open("demo-run")
    assert opened.tensor("blocks.0:attention").shape == (1, 4, 32, 32)
    assert len(opened.series("blocks.3:grad_output", "l2").values) == 4
    assert opened.steps().tolist() == [0, 1, 2, 3], "its evaluations make no steps"
    shown = torchtap("show", "demo-run", "--rows", 1).stdout
    assert "phases: train (4 steps), eval (2 steps)" in shown
    of_phase = json.loads(torchtap("show", "demo-run", "--phase", "eval", "--json").stdout)
    assert of_phase["phases"] == {"train": 4, "eval": 2}
    assert of_phase["steps"] == {"count": 2, "first": 0, "last": 3}
    refused = torchtap("show", "demo-run", "--phase", "valid")
    assert (refused.returncode, "no phase 'valid'" in refused.stderr) == (2, True)
    assert torchtap("demo", "--steps", 1).returncode == 0  # a second time, over the first
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert torchtap("demo", "--out", "mine").returncode == 2
    assert (tmp_path / "mine" / "thesis.txt").exists()
