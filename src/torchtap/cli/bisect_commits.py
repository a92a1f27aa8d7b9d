"""``torchtap bisect-commits GOOD BAD -- CMD``: find the commit that changed a layer, by ``git bisect run``."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import click

from torchtap.cli.console import say, say_json
from torchtap.errors import CompareError
from torchtap.sanitize import read_file

__all__ = ["command"]

# A command that fails to run is no answer: 1 is a difference, everything else is skipped.
_ANSWER = '"$@"; code=$?; [ $code -le 1 ] && exit $code; exit 125'


@click.command("bisect-commits", context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("good")
@click.argument("bad")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def command(good: str, bad: str, words: tuple[str, ...], as_json: bool) -> None:
    """Find the commit between GOOD and BAD that changed the numbers, and name the layer.

    CMD runs tests with the fixture torchtap_golden, for example `pytest tests/test_model.py`. The goldens are
    recorded at GOOD into a temporary folder, so the repository needs none. Tracked files must have no changes. Exit
    code: 0 found, 1 BAD does not differ from GOOD, 2 an error.
    """
    here = _git("rev-parse", "--show-toplevel").strip()
    if _git("status", "--porcelain", "--untracked-files=no").strip():
        raise CompareError(
            "tracked files have changes; commit or stash them, because commits are checked out in turn"
        )
    before = (
        _git("symbolic-ref", "--quiet", "--short", "HEAD", check=False).strip()
        or _git("rev-parse", "HEAD").strip()
    )
    # Names such as HEAD~2 mean another commit once one is checked out.
    good, bad = (_git("rev-parse", "--verify", f"{each}^{{commit}}").strip() for each in (good, bad))
    with tempfile.TemporaryDirectory() as folder:
        try:
            found, lines = _search(good, bad, words, Path(folder), here)
        finally:
            _git("bisect", "reset", check=False)
            _git("checkout", "--quiet", before)
    if as_json:
        say_json({"commit": found, "good": good, "bad": bad, "text": lines})
    else:
        for line in lines:
            say(line)
    raise SystemExit(int(found is None))


def _search(
    good: str, bad: str, words: tuple[str, ...], folder: Path, here: str
) -> tuple[str | None, list[str]]:
    """Return the commit that changed the numbers, None if BAD does not differ, and what to print of it."""
    _git("checkout", "--quiet", good)
    if _run(words, folder, "record") != 0:
        raise CompareError(f"the command fails at {good}: {shlex.join(words)}")
    if not any((folder / "goldens").rglob("manifest.json")):
        raise CompareError(f"the command records no golden: {shlex.join(words)}")
    _git("checkout", "--quiet", bad)
    if _run(words, folder, "check") == 0:
        return None, [f"{bad} computes the same as {good}"]
    _git("bisect", "start", bad, good)
    command = ["git", "bisect", "run", "sh", "-c", _ANSWER, "sh", *words]
    done = subprocess.run(
        command, env=_environment(folder, "check"), cwd=here, capture_output=True, text=True, check=False
    )
    found = re.search(r"^([0-9a-f]{40}) is the first bad commit", done.stdout, re.MULTILINE)
    if found is None:
        raise CompareError(
            f"git bisect found no single commit: {done.stdout[-800:].strip()} {done.stderr[-300:]}"
        )
    _git("checkout", "--quiet", found[1])
    for old in (folder / "report").glob("*"):
        old.unlink()
    _run(words, folder, "check")
    lines = [_git("show", "--no-patch", "--format=%h %an: %s", found[1]).strip()]
    reports = sorted((folder / "report").glob("*.txt"))
    return found[1], lines + [read_file(path).decode().strip() for path in reports]


def _environment(folder: Path, mode: str) -> dict[str, str]:
    places = {
        "TORCHTAP_GOLDEN_DIR": str(folder / "goldens"),
        "TORCHTAP_GOLDEN_REPORT": str(folder / "report"),
    }
    # Compiled files of another commit, made within one second, would be taken for this one's.
    return {**os.environ, **places, "TORCHTAP_GOLDEN": mode, "PYTHONDONTWRITEBYTECODE": "1"}


def _run(words: tuple[str, ...], folder: Path, mode: str) -> int:
    return subprocess.run(words, env=_environment(folder, mode), capture_output=True, check=False).returncode


def _git(*words: str, check: bool = True) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise CompareError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
