"""Tests and code depend neither on where they lie nor on what else is installed or set."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import torchtap as tt

ROOT = Path(__file__).parents[1]
NAMES = {"PyYAML": "yaml", "mlflow-skinny": "mlflow", "torch-module-monitor": "torch_module_monitor",
         "pytorch-ignite": "ignite"}  # fmt: skip
ALWAYS = {"pytest", "hypothesis", "torchtap", "ruff", "mypy"}


def optional_packages() -> set[str]:
    """Return the modules of every extra of the package."""
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words = [each for extra in facts["optional-dependencies"].values() for each in extra]
    names = {re.split(r"[\[<>=]", word)[0] for word in words}
    return {NAMES.get(name, name) for name in names} - ALWAYS


def imported_at_the_top(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_no_test_file_needs_an_optional_package_to_be_collected() -> None:
    optional = optional_packages()
    assert {"lightning", "transformers", "yaml", "duckdb"} <= optional
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        needed = imported_at_the_top(path) & optional
        assert not needed, f"{path}: {needed}: use tests.optional.need, which skips the file with a reason"
        text = path.read_text(encoding="utf-8")
        assert "importorskip" not in text or path == Path(__file__), (
            f"{path}: a broken package would stop the run"
        )


OPTIONS = ["-o", "addopts=--import-mode=importlib"]


def test_a_broken_package_skips_the_files_that_need_it_and_stops_nothing(tmp_path: Path) -> None:
    for name in ("lightning", "torchvision", "accelerate", "ignite"):
        (tmp_path / f"{name}.py").write_text(
            "raise RuntimeError('operator torchvision::nms does not exist')\n"
        )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])
    files = [f"tests/integrations/{name}.py" for name in ("test_lightning", "test_accelerate_and_ignite")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *OPTIONS, *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert "2 skipped" in done.stdout, done.stdout
    assert "torchvision::nms does not exist" in done.stdout


# What may differ between the machines of two users. The program records a training and reads it, shows it and compares.
PLACES: dict[str, dict[str, str]] = {
    "no locale": {"LC_ALL": "C", "LANG": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "another time zone": {"TZ": "Pacific/Kiritimati"},
    "no home": {"HOME": "/nonexistent"},
    "three torch threads": {"OMP_NUM_THREADS": "3"},
    "no colours, a narrow terminal": {"TERM": "dumb", "COLUMNS": "40"},
    "no network": {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"},
}

PROGRAM = """
import os, sys
os.umask(0o077)
import torch
import torchtap as tt
from torchtap.cli import main
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
model.add_module("größe", torch.nn.Linear(4, 1))
with tt.watch(model, "runs/run", ["*:output"]) as watch:
    for step in range(3):
        with watch.step():
            model(torch.ones(2, 4)).sum().backward()
run = tt.open("runs/run")
assert run.series("größe:output", "count").values.tolist() == [2.0] * 3
assert tt.compare("runs/run", "runs/run").same
print(run)
main(["show", "runs/run"])
"""


@pytest.mark.parametrize("what", PLACES)
def test_recording_reading_and_showing_do_not_depend_on_the_machine(tmp_path: Path, what: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    place = tmp_path / "mit Leerzeichen é" / "torchtap"
    place.mkdir(parents=True)
    (place / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=place,
        env={**kept, "PYTHONPATH": str(Path(tt.__file__).parents[1]), **PLACES[what]},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")


def test_no_test_recognises_our_code_by_the_name_of_a_folder() -> None:
    """A clone may lie in a folder of any name, also in one named torchtap."""
    pattern = re.compile(r"""["'][^"']*/torchtap/?["'] (not )?in\b""")
    for folder in ("tests", "benchmarks", "src", "packaging"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found = [line for line in path.read_text(encoding="utf-8").splitlines() if pattern.search(line)]
            assert not found, f"{path}: {found}: compare with the folder of torchtap.__file__"
