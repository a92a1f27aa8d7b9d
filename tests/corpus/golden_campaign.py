"""Commit every change of `golden_commits` to a copy of the sample project and check its goldens with pytest.

    python -m tests.corpus.golden_campaign [--only TEXT] [--set tuned|held out|new] [--folder F]

Prints one line for each commit that was judged wrongly, and a table. Each check is a process of its own: a fork, so
that torch is imported once. Exit code 1 if fewer than 95 % of the faults are noticed, fewer than 90 % named right, or
more than one harmless commit raises an alarm.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo
from tests.corpus.golden_commits import HELD_OUT, Commit, faults, harmless, new_faults, new_harmless

SAMPLE = Path(__file__).with_name("golden_repository")


def git(folder: Path, *words: str) -> str:
    """Run git in the repository."""
    named = ["-c", "user.name=sample", "-c", "user.email=sample@example.com"]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        ["git", *named, *words], cwd=folder, check=True, capture_output=True, text=True, env=environment
    )
    return done.stdout


def make_repository(folder: Path) -> None:
    """Copy the sample, make weights that look trained, record the goldens and commit everything."""
    shutil.copytree(SAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "checks.py").rename(folder / "test_models.py")  # not to be collected among torchtap's own tests
    (folder / "weights").mkdir()
    (folder / ".gitignore").write_text("__pycache__\ntorchtap-golden-report\n.pytest_cache\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:cacheprovider\n")
    in_fork(_write_weights, folder)
    git(folder, "init", "-q", "-b", "main")
    code, said = checked(folder, "", "record")
    assert code == 0, said
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "The models and their goldens")


def _write_weights(folder: Path) -> int:
    sys.path.insert(0, str(folder))
    import models  # type: ignore[import-not-found]

    torch.manual_seed(11)
    for name, kind in models.CLASSES.items():
        model = kind(**models.config(name))
        with torch.no_grad():
            for key, value in model.state_dict().items():
                if value.dtype.is_floating_point:
                    noise = torch.randn_like(value)
                    base = 1.0 if ("norm" in key or "bn" in key) and key.endswith("weight") else 0.0
                    value.copy_(value * 1.2 + 0.05 * noise if value.dim() >= 2 else base + 0.1 * noise)
                if key.endswith("running_var"):
                    value.copy_(0.5 + torch.rand_like(value))
        torch.save(model.state_dict(), folder / "weights" / f"{name}.pt")
    return 0


def in_fork(function: object, *arguments: object) -> tuple[int, str]:
    """Run a function in a fork of this process. Return its result and what it printed."""
    with tempfile.TemporaryFile("w+") as said:

        def child() -> None:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
            code = int(function(*arguments))  # type: ignore[operator]
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        said.seek(0)
        return int(process.exitcode or 0), said.read()


def _pytest(folder: Path, test: str, mode: str) -> int:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    chosen = ["-k", f"[{test}]"] if test else []
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins take longer to import than the check
    plugin = ["-p", "torchtap.integrations.pytest_golden"]
    return int(pytest.main([*plugin, f"--torchtap-golden={mode}", "test_models.py", *chosen]))


def checked(folder: Path, test: str, mode: str = "check") -> tuple[int, str]:
    """Run the test of one golden, or of all, in a process of its own."""
    return in_fork(_pytest, folder, test, mode)


def layer_of(said: str) -> str | None:
    """Return the module that a failure names."""
    found = re.search(r"first difference in (.+)", said)
    return None if found is None else found[1].replace("the model itself", "")


def run(commit: Commit, folder: Path) -> tuple[bool, bool, str]:
    """Commit a change, check it and take it back. Return whether there was an alarm, a right one, and what was said."""
    commit.apply(folder)
    git(folder, "commit", "-qam", f"{commit.test}: {commit.title}")
    try:
        code, said = checked(folder, commit.test)
    finally:
        git(folder, "reset", "-q", "--hard", "HEAD~1")
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return code != 0, code == 1 and layer_of(said) in commit.truth, said


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="commits whose test and title have this text")
    parser.add_argument(
        "--set", choices=("tuned", "held out", "new"), help="one of the three sets of commits"
    )
    parser.add_argument("--folder", type=Path, help="make the repository there, or use the one that is there")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp()) / "sample"
    if not folder.exists():
        make_repository(folder)
    started, table, wrong = time.time(), {}, 0
    for kind, commits, new in (
        ("fault", faults(), False),
        ("harmless", harmless(), False),
        ("fault", new_faults(), True),
        ("harmless", new_harmless(), True),
    ):
        for commit in commits:
            which = "new" if new else "held out" if commit.test in HELD_OUT else "tuned"
            if (asked.set and asked.set != which) or asked.only not in f"{commit.test}: {commit.title}":
                continue
            alarm, right, said = run(commit, folder)
            counts = table.setdefault((kind, which), [0, 0, 0])
            counts[0] += 1
            counts[1] += alarm
            counts[2] += right
            if asked.verbose or (alarm if kind == "harmless" else not right):
                lines = [
                    line.strip()
                    for line in said.splitlines()
                    if re.search("golden|site:|cause:|Error|^E ", line)
                ]
                print(
                    f"{kind} {commit.test}: {commit.title} (truth {commit.truth}, named {layer_of(said)!r})",
                    flush=True,
                )
                print("    " + "\n    ".join(lines[:6]), flush=True)
    for (kind, which), (total, alarms, right) in table.items():
        print(f"{kind:9} {which:9} {total:4} commits {alarms:4} alarms {right:4} with the right layer")
    total, alarms, right = (
        sum(each[i] for (kind, _), each in table.items() if kind == "fault") for i in range(3)
    )
    false = sum(each[1] for (kind, _), each in table.items() if kind == "harmless")
    wrong = (total > 0 and (alarms < 0.95 * total or right < 0.9 * total)) or false > 1
    print(f"{time.time() - started:.0f} s")
    sys.exit(int(wrong))


if __name__ == "__main__":
    main()
