"""`import torch` and the user's script work in every layout of a broken, missing or shadowed torchtap."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import torchtap as tt
from torchtap.cli.run import flag_that_prevents_recording
from torchtap.integrations.inject import FOLDER, injected_path

SOURCE = Path(tt.__file__).parent
NOT_RECORDED = "torchtap: this training is not recorded"

TRAINING = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""


class Layout:
    """A place with a script, a copy of the folder that starts recordings, and a torchtap to break."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.scripts = place / "scripts"
        self.scripts.mkdir(parents=True)
        self.script = self.scripts / "train.py"
        self.script.write_text("import torch\nprint('trained')\n")
        self.installed = place / "installed"
        self.package = self.installed / "torchtap"
        self.inject = self.package / "integrations" / "inject"
        self.flags: list[str] = []
        self.environment: dict[str, str] = {}

    def install(self, code: str | None = "") -> None:
        """Lay down a torchtap of nothing but the starting folder and this ``__init__``."""
        shutil.copytree(SOURCE / "integrations" / "inject", self.inject)
        if code is not None:
            (self.package / "__init__.py").write_text(code)

    def install_all(self) -> None:
        """Copy the whole package."""
        leave = shutil.ignore_patterns("__pycache__", "static")
        shutil.copytree(SOURCE, self.package, ignore=leave)

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TORCHTAP")}
        path = os.pathsep.join([str(self.inject), str(self.installed)])
        return subprocess.run(
            [sys.executable, *self.flags, str(self.script)],
            env={**known, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **self.environment, **variables},
            cwd=self.place,
            capture_output=True,
            text=True,
            timeout=300,
        )


def syntax_error(layout: Layout) -> None:
    layout.install("def :\n")


def import_error(layout: Layout) -> None:
    layout.install("import a_module_that_is_not_there\n")


def any_error(layout: Layout) -> None:
    layout.install("raise RuntimeError('broken install')\n")


def error_of_many_lines(layout: Layout) -> None:
    layout.install("raise RuntimeError('one\\nline \\x1b[31m of\\nmany')\n")


def ends_the_process(layout: Layout) -> None:
    layout.install("raise SystemExit(3)\n")


def binary_rubbish(layout: Layout) -> None:
    layout.install()
    (layout.package / "__init__.py").write_bytes(b"\x00\xff\xfe not Python")


def recursion(layout: Layout) -> None:
    layout.install("def f():\n    f()\nf()\n")


def half_removed(layout: Layout) -> None:
    layout.install(None)


def another_version(layout: Layout) -> None:
    layout.install("__version__ = '99.0'\n")
    (layout.package / "integrations" / "zero_code").mkdir()
    (layout.package / "integrations" / "zero_code" / "recording.py").write_text("def start(): ...\n")


def begins_with_an_error(layout: Layout) -> None:
    layout.install("")
    (layout.package / "integrations" / "zero_code").mkdir()
    (layout.package / "integrations" / "zero_code" / "recording.py").write_text(
        "def begin(words):\n    1 / 0\n"
    )


def not_installed(layout: Layout) -> None:
    layout.install("")
    layout.inject = layout.inject.rename(layout.place / "left_behind")


def removed_altogether(layout: Layout) -> None:
    layout.install("")
    shutil.rmtree(layout.installed)


def file_beside_the_script(layout: Layout) -> None:
    layout.install("")
    (layout.scripts / "torchtap.py").write_text("open('was_imported', 'w')\n")


def folder_beside_the_script(layout: Layout) -> None:
    layout.install("")
    (layout.scripts / "torchtap").mkdir()
    (layout.scripts / "torchtap" / "__init__.py").write_text("raise RuntimeError('the user s own')\n")


def imported_file_beside_the_script(layout: Layout) -> None:
    layout.install("")
    (layout.scripts / "torchtap.py").write_text("x = 1\n")
    layout.script.write_text("import torchtap, torch\nassert torchtap.x == 1\nprint('trained')\n")


def moved_editable_checkout(layout: Layout) -> None:
    layout.install("")
    moved = layout.place / "moved"
    layout.inject = layout.inject.rename(layout.place / "left_behind")
    layout.installed.rename(moved)


def another_torch(layout: Layout) -> None:
    layout.install_all()
    (layout.package / "errors.py").write_text("from torch import a_name_that_was_removed\n")


def unknown_setting(layout: Layout) -> None:
    layout.install_all()
    layout.environment["TORCHTAP"] = '{"nonsense": 1}'


def cut_json(layout: Layout) -> None:
    layout.install_all()
    layout.environment["TORCHTAP"] = '{"out": '


def isolated(layout: Layout) -> None:
    layout.install("raise RuntimeError('broken install')\n")
    layout.flags = ["-I"]


def without_environment(layout: Layout) -> None:
    layout.install("raise RuntimeError('broken install')\n")
    layout.flags = ["-E"]


LAYOUTS: list[Callable[[Layout], None]] = [
    syntax_error,
    import_error,
    any_error,
    error_of_many_lines,
    ends_the_process,
    binary_rubbish,
    recursion,
    half_removed,
    another_version,
    begins_with_an_error,
    not_installed,
    removed_altogether,
    file_beside_the_script,
    folder_beside_the_script,
    imported_file_beside_the_script,
    moved_editable_checkout,
    another_torch,
    unknown_setting,
    cut_json,
    isolated,
    without_environment,
]
# In these nothing of this folder runs, so nothing can be reported.
SILENT = {removed_altogether, isolated, without_environment}


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
def test_a_training_runs_though_torchtap_cannot_and_one_line_says_so(
    tmp_path: Path, make: Callable[[Layout], None]
) -> None:
    layout = Layout(tmp_path)
    make(layout)
    done = layout.run(**{"TORCHTAP": "1", **layout.environment})
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    lines = [line for line in done.stderr.splitlines() if "torchtap" in line]
    assert len(lines) == (make not in SILENT), done.stderr
    assert all(line.startswith(NOT_RECORDED) and line.isprintable() for line in lines), done.stderr
    assert not (tmp_path / "was_imported").exists(), "a user's own module was imported"


@pytest.mark.parametrize("word", ["", "0", "off"])
def test_without_the_variable_nothing_of_torchtap_is_imported(tmp_path: Path, word: str) -> None:
    layout = Layout(tmp_path)
    layout.install("raise RuntimeError('broken install')\n")
    layout.script.write_text(
        "import sys, torch\n"
        "assert not [name for name in sys.modules if name.startswith('torchtap')]\n"
        "assert sys.meta_path and not [each for each in sys.meta_path if 'Starter' in repr(each)]\n"
    )
    done = layout.run(TORCHTAP=word)
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_offers_torchtap_no_entry_point() -> None:
    """Whatever is registered there can break ``import torch``, and costs it time."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert "torch.backends" not in text
    assert re.findall(r"\[project\.entry-points\.(.*?)\]", text) == [
        "pytest11"
    ]  # inert unless a test uses it


HEALTHY = """
import sys
sys.path.insert(0, {source!r})
from torchtap.plan import tap          # imports torch, in the middle of torchtap
import torchtap.session.capture
"""


def test_a_script_that_imports_torchtap_before_torch_is_recorded(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.inject = Path(FOLDER)
    layout.script.write_text(HEALTHY.format(source=str(SOURCE.parent)) + TRAINING)
    done = layout.run(TORCHTAP='{"out": "run", "every": 1}')
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "torchtap view run" in done.stderr
    assert len(tt.open(tmp_path / "run").steps()) == 3


def test_the_loader_of_torch_is_left_as_it_was(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.inject, layout.installed = Path(FOLDER), SOURCE.parent
    layout.script.write_text(
        "import sys, torch, sitecustomize\n"
        "assert vars(torch.__spec__.loader).keys() == {'name', 'path'}, vars(torch.__spec__.loader)\n"
        f"assert {FOLDER!r} not in sys.path\n"
    )
    done = layout.run(TORCHTAP="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code", ["import sys; sys.mine = 5", "import sys; sys.mine = 5; raise KeyError('own')"]
)
def test_the_users_own_sitecustomize_runs_as_without_torchtap(tmp_path: Path, code: str) -> None:
    layout = Layout(tmp_path)
    layout.install("")
    (layout.installed / "sitecustomize.py").write_text(code + "\n")
    layout.script.write_text("import sys\nprint(sys.mine, 'sitecustomize' in sys.modules)\n")
    injected = layout.run()
    layout.inject = tmp_path / "nothing"
    plain = layout.run()
    assert (injected.stdout, injected.returncode) == (plain.stdout, plain.returncode)
    assert injected.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_a_torch_that_cannot_be_imported_fails_as_without_torchtap(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.install("")
    (layout.scripts / "torch.py").write_text("raise OSError('libtorch.so: no such file')\n")
    layout.script.write_text("try:\n    import torch\nexcept OSError as error:\n    print(error)\n")
    done = layout.run(TORCHTAP="1")
    assert (done.stdout, done.stderr) == ("libtorch.so: no such file\n", "")


CHILDREN = """
import os, subprocess, sys
import torch.multiprocessing as mp

def train(rank):
    exec(compile({training!r}, "training", "exec"), {{}})

if __name__ == "__main__":
    mp.spawn(train, nprocs=1)
    subprocess.run([sys.executable, {script!r}], check=True)
"""


def test_processes_that_the_script_starts_are_recorded_too(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(TRAINING)
    parent = tmp_path / "parent.py"
    parent.write_text(CHILDREN.format(training=TRAINING, script=str(script)))
    words = [sys.executable, "-m", "torchtap", "run", "--every", "1", "--out", "run", parent]
    done = subprocess.run([str(word) for word in words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "trained\ntrained\n"), done.stderr
    assert done.stderr.count("Look: torchtap view run") == 2, done.stderr


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        (["/usr/bin/python3", "-I", "train.py"], "-I"),
        (["python", "-X", "dev", "-uE", "train.py"], "-E"),
        (["python3.12", "-Wignore", "-S", "-m", "train"], "-S"),
        (["python", "train.py", "-I"], None),
        (["python", "-m", "train", "-S"], None),
        (["python", "-uB", "train.py"], None),
        (["python", "-XEIS", "train.py"], None),
        (["/usr/bin/torchrun", "-I"], None),
    ],
)
def test_a_flag_of_python_that_prevents_recording_is_noticed(line: list[str], flag: str | None) -> None:
    assert flag_that_prevents_recording(line) == flag


def test_the_present_path_stays_behind_the_folder() -> None:
    separator = os.pathsep
    assert injected_path(None) == injected_path("") == FOLDER
    assert injected_path(f"{separator}src") == f"{FOLDER}{separator}{separator}src"
    assert injected_path(f"a{separator}{FOLDER}{separator}b") == f"{FOLDER}{separator}a{separator}b"
