"""The pytest plugin, the command line and the search for a commit."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.corpus.golden_campaign import git

from torchtap.cli.bisect_commits import command as bisect
from torchtap.cli.golden import command as golden

SOURCE = Path(__file__).parents[2] / "src"
TEST = """
import torch
from torch import nn

def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.ones(3, 4),)

def test_net(torchtap_golden):
    model, inputs = made()
    torchtap_golden(model, inputs)
"""


def run(folder: Path, *words: str) -> tuple[int, str]:
    """Run pytest in a process of its own. A fork would share the state of torch's threads, which may be locked."""
    common = ["-q", "-p", "no:cacheprovider", "-p", "torchtap.integrations.pytest_golden"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(SOURCE)}
    environment.pop("CI", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *common, "--rootdir", str(folder), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_plugin_that_is_not_used_imports_no_torch() -> None:
    code = "import sys, torchtap.integrations.pytest_golden; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_the_first_run_records_later_ones_check_and_a_change_is_accepted_by_name(tmp_path: Path) -> None:
    path = tmp_path / "test_net.py"
    path.write_text(TEST)
    code, said = run(tmp_path, "--torchtap-golden=check")
    assert code == 1
    assert "there is no golden 'net'" in said
    code, said = run(tmp_path)
    assert code == 0
    assert "golden 'net' recorded in" in said
    assert run(tmp_path, "--torchtap-golden=check")[0] == 0
    path.write_text(TEST.replace("nn.ReLU()", "nn.GELU()"))
    code, said = run(tmp_path)
    assert code == 1
    assert "first difference in 1\n" in said
    assert "pytest --torchtap-golden=accept:net" in said
    assert "1:output" in (tmp_path / "torchtap-golden-report" / "net.html").read_text()
    assert run(tmp_path, "--torchtap-golden=accept:other")[0] == 1
    code, said = run(tmp_path, "--torchtap-golden=accept", "net")
    assert code == 0
    assert "accepted" in said
    assert run(tmp_path, "--torchtap-golden=check")[0] == 0


def test_a_mode_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--torchtap-golden=chekc")
    assert code == 4
    assert "the modes are record, check, accept" in said


def test_the_command_line_records_checks_accepts_and_lists(tmp_path: Path) -> None:
    script = tmp_path / "nets.py"
    script.write_text(TEST)
    runner, folder = CliRunner(), ["--dir", str(tmp_path / "goldens")]

    def call(*words: str) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            done = runner.invoke(golden, [*words, *folder])
        return done.exit_code, done.output + str(done.exception or "")

    assert call("record", "net", "nets.py:made")[0] == 0
    assert "exists" in call("record", "net", "nets.py:made")[1]
    assert call("check") == (0, "golden 'net': same function\n")
    assert "Sequential" in call("list")[1]
    script.write_text(TEST.replace("manual_seed(0)", "manual_seed(1)"))
    code, said = call("check", "net")
    assert code == 1
    assert "first difference in 0" in said
    assert "torchtap golden accept net" in said
    assert call("accept", "net")[0] == 0
    assert call("check")[0] == 0
    assert "there is no golden 'other'" in call("check", "other")[1]


def script_of(step: str) -> str:
    """Return the shell script of a step of the GitHub action."""
    text = (SOURCE.parent / "action.yml").read_text().split(f"- name: {step}\n")[1].split("\n    - name:")[0]
    run = text.split("      run: ")[1]
    return textwrap.dedent(run.removeprefix("|\n"))


def test_the_action_writes_the_verdict_comments_it_and_fails(tmp_path: Path) -> None:
    (tmp_path / "test_net.py").write_text(TEST)
    assert run(tmp_path)[0] == 0
    tool = tmp_path / "gh"  # there is no GitHub here: keep what would be sent
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$SENT"\n')
    tool.chmod(0o755)
    common = "-q -p no:cacheprovider -p torchtap.integrations.pytest_golden --torchtap-golden=check"
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TORCHTAP_GOLDEN_REPORT": str(tmp_path / "report"),
        "COMMAND": f"{shlex.quote(sys.executable)} -m pytest {common}", "SENT": str(tmp_path / "sent"),
        "GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "GITHUB_REPOSITORY": "a/b", "PULL": "7", "RUN": "https://example.com/1",
    }  # fmt: skip

    def step(name: str, **more: str) -> int:
        command = ["bash", "-e", "-o", "pipefail", "-c", script_of(name)]
        done = subprocess.run(command, cwd=tmp_path, env={**environment, **more}, check=False, timeout=240)
        return done.returncode

    def outputs() -> tuple[str, str]:
        text = (tmp_path / "output").read_text()
        (tmp_path / "output").unlink()
        verdict = text.split("<<END_OF_VERDICT\n")[1].split("END_OF_VERDICT")[0].strip()
        return verdict, text.rpartition("code=")[2].strip()

    assert step("Check the goldens") == 0
    assert outputs() == ("", "0")
    assert not (tmp_path / "summary").exists()
    (tmp_path / "test_net.py").write_text(TEST.replace("nn.ReLU()", "nn.GELU()"))
    assert step("Check the goldens") == 0
    verdict, code = outputs()
    assert "first difference in 1" in verdict
    assert verdict in (tmp_path / "summary").read_text()
    assert (tmp_path / "report" / "net.html").exists()
    assert step("Comment on the pull request", VERDICT=verdict) == 0
    sent = (tmp_path / "sent").read_text()
    assert sent.startswith("pr\ncomment\n7\n--repo\na/b\n")
    assert verdict in sent
    assert step("Fail if something differs", CODE=code) == 1


def test_the_commit_that_changed_a_layer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    for number, text in enumerate([TEST, TEST + "# more\n", TEST.replace("nn.ReLU()", "nn.Tanh()")]):
        (tmp_path / "test_net.py").write_text(text)
        git(tmp_path, "add", "test_net.py")
        git(tmp_path, "commit", "-q", "-m", f"change {number}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    check = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    check += ["-p", "torchtap.integrations.pytest_golden"]
    done = CliRunner().invoke(bisect, ["HEAD~2", "HEAD", "--", *check])
    assert done.exit_code == 0, done.output
    assert "change 2" in done.output
    assert "first difference in 1\n" in done.output
    assert git(tmp_path, "symbolic-ref", "--short", "HEAD").strip() == "main"
    (tmp_path / "test_net.py").write_text("")
    assert "commit or stash" in str(CliRunner().invoke(bisect, ["HEAD~2", "HEAD", "--", *check]).exception)
