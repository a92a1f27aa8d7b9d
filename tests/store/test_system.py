"""A run is written and read also where the operating system has fewer calls: no fcntl, no dir_fd, no preadv."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtap.store.files import system

SOURCE = Path(__file__).parents[2] / "src" / "torchtap"

# Takes away what Windows does not have. Programs begin with it.
FEWER_CALLS = """
import os, sys
sys.modules["fcntl"] = None
sys.modules["resource"] = None
import asyncio, tempfile, subprocess, multiprocessing, socket, torch  # these ask for some at import
for name in ("writev", "preadv", "pread", "pwrite", "posix_fallocate", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK",
             "O_DIRECTORY"):
    if hasattr(os, name):
        delattr(os, name)
os.supports_dir_fd = set()
os.supports_fd = set()
"""


def run_program(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FEWER_CALLS + program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def plainly(program: str, path: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", "import sys\n" + program, path], capture_output=True, text=True, check=True
    ).stdout


def test_every_module_imports_where_there_is_no_fcntl() -> None:
    printed = run_program(
        """
import importlib, pkgutil, torchtap
from torchtap.errors import MissingExtraError
count = 0
for found in pkgutil.walk_packages(torchtap.__path__, "torchtap."):
    if found.name.endswith("__main__") or found.name == "torchtap.reduce.triton_kernel":
        continue  # the one starts, the other needs Triton
    try:
        importlib.import_module(found.name)
    except MissingExtraError:
        pass
    count += 1
print(count)
"""
    )
    assert int(printed) > 300


def test_no_module_imports_a_unix_only_module_at_its_top() -> None:
    import ast

    unix_only = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix"}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not unix_only & set(names), f"{path} imports {names} at its top"


RECORD = """
import torch, torchtap as tt
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tt.watch(model, sys.argv[1], [tt.tap("*:output"), tt.tap("2:output", tt.Full())]) as watch:
    for step in range(5):
        with watch.step():
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
READ = """
import json, torchtap as tt
run = tt.open(sys.argv[1])
print(json.dumps([run.status, len(run.steps()), run.series("0:output", "std").values.tolist(),
                  run.tensor("2:output", step=3).tolist()]))
"""


def test_a_run_that_is_written_with_fewer_calls_is_the_same_run(tmp_path: Path) -> None:
    run_program(RECORD, str(tmp_path / "fewer"))
    plainly(RECORD, str(tmp_path / "plain"))
    for reader in (run_program, plainly):
        fewer = json.loads(reader(READ, str(tmp_path / "fewer")))
        assert fewer == json.loads(reader(READ, str(tmp_path / "plain")))
        assert fewer[:2] == ["closed", 5]


def test_a_link_inside_a_run_is_refused_also_without_descriptors_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("not yours")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "run" / "inside").symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.setattr(system, "_walks_by_descriptor", False)
    for inside, name in (((), "link"), (("inside",), "secret")):
        with pytest.raises(OSError, match="is a link"):
            system.open_below(str(tmp_path / "run"), inside, name)
    assert sorted(system.names_below(str(tmp_path / "run"), ())) == ["inside", "link"]


def test_a_held_file_is_seen_as_held_and_a_closed_one_as_free(tmp_path: Path) -> None:
    lock = system.open_lock(str(tmp_path / "lock"))
    system.hold(lock)
    asking = system.open_below(str(tmp_path), (), "lock")
    assert system.is_held(asking) is True
    os.close(lock)
    assert system.is_held(asking) is False
    os.close(asking)


def test_where_nothing_locks_nobody_can_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_has_flock", False)
    lock = system.open_lock(str(tmp_path / "lock"))
    system.hold(lock)
    assert system.is_held(lock) is None
    os.close(lock)


def test_locks_of_bytes_are_used_where_files_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows' own module cannot be had here: what it is called with, and how its refusal is read."""

    class Locking:
        LK_NBLCK = 2
        held = False

        @classmethod
        def locking(cls, descriptor: int, mode: int, count: int) -> None:
            assert (mode, count, os.lseek(descriptor, 0, os.SEEK_CUR)) == (cls.LK_NBLCK, 1, 0)
            if cls.held:
                raise PermissionError(13, "Permission denied")
            cls.held = True

    monkeypatch.setattr(system, "_has_flock", False)
    monkeypatch.setattr(system, "_has_locking", True)
    monkeypatch.setitem(sys.modules, "msvcrt", Locking)
    lock = system.open_lock(str(tmp_path / "lock"))
    system.hold(lock)
    assert system.is_held(lock) is True
    os.close(lock)
