"""Every command has ``--json``, and what it prints is strict JSON: no NaN, no infinities, nothing beside."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import nn

import torchtap as tt
from torchtap.cli import COMMANDS, main, torchtap


def strictly(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a NaN in it, which JSON has no word for."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with tt.watch(model, folder, [tt.tap("*:output"), tt.tap("0:output", tt.Full(), every=2)]) as watch:
        for step in range(5):
            with watch.step():
                model(torch.full((3, 4), math.nan if step == 4 else 1.0))
                watch.log(loss=math.inf)
    return folder


def printed(capfd: pytest.CaptureFixture[str], *words: object) -> Any:
    capfd.readouterr()
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    return strictly(capfd.readouterr().out)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_json(name: str) -> None:
    command = torchtap.get_command(click.Context(torchtap), name)
    assert command is not None
    for each in command.commands.values() if isinstance(command, click.Group) else [command]:
        assert any("--json" in option.opts for option in each.params), (
            f"torchtap {name} {each.name} has no --json"
        )


def test_what_a_command_says_of_a_run_is_strict_json(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert printed(capfd, "show", run, "--json")["steps"]["count"] == 5
    tailed = printed(capfd, "tail", run, "--once", "--json")
    assert tailed["step"] == 4
    assert tailed["sites"]["0:output"]["nans"] == 12
    assert tailed["sites"][":value.loss"]["value"] == "inf"
    assert any("NaN" in str(finding) or "nan" in str(finding) for finding in tailed["findings"])
    assert isinstance(printed(capfd, "diagnose", run, "--json"), list)
    learned = printed(capfd, "learn", run, "-o", tmp_path / "good.json", "--json")
    assert learned["sites"] == {"train": 4}
    assert isinstance(printed(capfd, "diagnose", run, "--against", tmp_path / "good.json", "--json"), list)
    exported = printed(capfd, "export", run, "--to", "csv", "-o", tmp_path / "run.csv", "--json")
    assert Path(exported["path"]).is_file()
    report = printed(capfd, "report", run, "-o", tmp_path / "page.html", "--json")
    assert Path(report["path"]).stat().st_size == report["bytes"]
    assert printed(capfd, "compare", run, run, "--json")["outcome"] in ("same", "cannot tell")


def test_what_a_command_says_of_a_model_is_strict_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made.py").write_text(
        "from torch import nn\ndef model(): return nn.Sequential(nn.Linear(2, 2))\n"
    )
    sites = printed(capfd, "sites", f"{tmp_path}/made.py:model", "--kind", "output", "--json")
    assert [site["site"] for site in sites] == [":output", "0:output"]
    tested = printed(capfd, "selftest", "--device", "cpu", "--json")
    assert tested["held"] is True
    assert tested["facts"]["torch"].startswith(torch.__version__)
    checked = printed(capfd, "rcc", "--widths", "16,32", "--steps", "1", "-o", tmp_path / "rcc.png", "--json")
    assert checked[0]["widths"] == [16, 32]


def test_the_demo_says_at_its_end_what_it_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    facts = printed(capfd, "demo", "--steps", "2", "--out", tmp_path / "demo", "--json")
    assert facts["run"] == str(tmp_path / "demo")
    assert facts["loss"] > 0


def test_run_says_first_where_it_records_and_what_it_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('the script')\n")
    words = ["run", "--json", "--out", str(tmp_path / "run"), str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "torchtap", *words], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    first, *rest = done.stdout.splitlines()
    assert strictly(first) == {"run": str(tmp_path / "run"), "command": [sys.executable, str(script)]}
    assert rest == ["the script"]


def test_view_says_its_address_on_one_line(run: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "torchtap", "view", str(run), "--no-browser", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        try:
            assert server.stdout is not None
            assert strictly(server.stdout.readline())["address"].startswith("http://127.0.0.1:")
        finally:
            server.terminate()
            server.wait(20)


def test_tail_tells_programs_of_each_new_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    watch = tt.watch(model, tmp_path / "run", [tt.tap("*:output")], flush_seconds=0.05)
    with watch.step():
        model(torch.ones(1, 2))
    watch.flush()
    tail = subprocess.Popen(
        [sys.executable, "-u", "-m", "torchtap", "tail", str(tmp_path / "run"), "--json", "--poll", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tail.stdout is not None
    assert strictly(tail.stdout.readline())["step"] == 0
    for _ in range(3):
        with watch.step():
            model(torch.ones(1, 2))
        watch.flush()
        time.sleep(0.2)
    watch.close()
    with tail:
        lines = [strictly(line) for line in tail.stdout]
        assert tail.wait(30) == 0
    assert lines[-1]["step"] == 3


READ_ONLY = ("show", "tail", "diagnose", "learn", "export", "report", "view")


@pytest.mark.parametrize("name", READ_ONLY)
def test_commands_that_only_read_import_no_torch_for_their_help(name: str) -> None:
    program = (
        "import sys; from torchtap.cli import main\n"
        "try: main([sys.argv[1], '--help'])\n"
        "finally: assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", program, name], check=True, capture_output=True)


@pytest.mark.parametrize("words", [["show"], ["tail", "--once"], ["diagnose"]])
def test_commands_that_only_read_numbers_import_no_torch(words: list[str], run: Path) -> None:
    program = (
        "import sys; from torchtap.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: assert stop.code in (0, 1, None), stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run(
        [sys.executable, "-c", program, *words, str(run), "--json"], check=True, capture_output=True
    )
