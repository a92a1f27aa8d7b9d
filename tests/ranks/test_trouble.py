"""Ranks that die, restart, are not watched or do not know who they are: nothing hangs or is hidden, all is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.store.object_store import served_bucket

import torchtap as tt

PROGRAM = Path(__file__).parent / "trouble.py"
ROOT = Path(__file__).parents[2]


def start(mode: str, folder: Path | str, world: int, **environment: str) -> list[subprocess.Popen[str]]:
    """So many processes of ``trouble.py``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    common = {**known, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src", **environment}
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), mode, str(folder), str(rank), str(world), str(port)],
            env=common,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float = 180) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=timeout)
        assert process.returncode == 0, errors[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that does not need a kill, in few launches."""
    path = tmp_path_factory.mktemp("trouble")
    finish(start("several", path, 2))
    finish(start("restart", path, 2))
    finish(start("nobody", path / "nobody", 2))
    return path


def test_a_watch_on_one_rank_alone_makes_nobody_wait_and_is_told(folder: Path) -> None:
    run = tt.open(folder / "rank0")
    assert run.series("0:output", "count").values.tolist() == [4 * 12.0] * 3
    assert run.series("0:param.weight", "norm").values.shape == (3,)
    assert any("2 processes trained, rank 1 recorded nothing" in problem for problem in run.problems)


def test_a_metric_is_of_the_rank_s_own_part_unless_it_says_whole(folder: Path) -> None:
    run = tt.open(folder / "metrics")
    parts = [run.rank(rank).series("0:param.weight", "norm").values[0] for rank in (0, 1)]
    statistics = [run.rank(rank).series("0:param.weight", "l2").values[0] for rank in (0, 1)]
    assert parts == pytest.approx(statistics, rel=1e-5)
    assert parts[0] != pytest.approx(parts[1], rel=1e-3)
    whole = [run.rank(rank).series("0:param.weight", "whole_norm").values[0] for rank in (0, 1)]
    assert whole[0] == whole[1] == pytest.approx((parts[0] ** 2 + parts[1] ** 2) ** 0.5, rel=1e-5)


def test_updates_are_measured_without_a_collective_and_fold(folder: Path) -> None:
    run = tt.open(folder / "metrics")
    ratio = run.series("0:update.weight", "ratio").values[0]
    change, weight = (run.series(f"0:{kind}.weight", "l2").values[0] for kind in ("update", "param"))
    assert ratio == pytest.approx(change / weight, rel=1e-5)


@pytest.mark.parametrize("name", ["inner", "inner_later"])
def test_the_module_inside_a_ddp_wrapper_is_folded_over_ranks(folder: Path, name: str) -> None:
    run = tt.open(folder / name)
    assert run.series("0:output", "count").values.tolist() == [4 * 12.0 * 2] * 3
    assert run.is_whole("0:output", "l2")
    placed = run.placement("0:output")
    assert placed is not None
    assert [axis.share.kind for axis in placed.axes] == ["batch"]
    parts = [run.rank(rank).series("0:output", "l2").values for rank in (0, 1)]
    assert run.series("0:output", "l2").values == pytest.approx((parts[0] ** 2 + parts[1] ** 2) ** 0.5)


def test_processes_that_nobody_tells_apart_do_not_hide_each_other(folder: Path) -> None:
    run = tt.open(folder / "nobody")
    assert run.ranks == [0]
    assert run.attempts == [0, 1]
    assert sum("two processes took themselves for rank 0" in problem for problem in run.problems) == 1
    seen = {tt.open(folder / "nobody", attempt=attempt).series(":value.who").values[0] for attempt in (0, 1)}
    assert seen == {0.0, 1.0}


def test_a_restart_with_fewer_ranks_leaves_no_old_rank_s_steps_beside_the_new_world_s(folder: Path) -> None:
    before = tt.open(folder / "elastic")
    assert before.steps().tolist() == [0, 1, 2, 3]
    assert before.series("0:output", "count").values.tolist() == [4 * 12.0 * 2] * 2 + [8 * 12.0] * 2
    assert before.rank(1).steps().tolist() == [0, 1, 2]
    assert before.problems == []


def test_a_restart_with_more_ranks_counts_all_of_them(folder: Path) -> None:
    run = tt.open(folder / "growing")
    assert run.series("0:output", "count").values.tolist() == [8 * 12.0] + [4 * 12.0 * 2] * 2
    assert run.problems == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_seen_and_every_flushed_value_is_there(tmp_path: Path, victim: int) -> None:
    processes = start("killed", tmp_path / "run", 2)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (tmp_path / "run" / "ready").exists():
            time.sleep(0.05)
        processes[victim].send_signal(signal.SIGKILL)
        processes[1 - victim].communicate(timeout=120)
    finally:
        for process in processes:
            with process:  # which closes its pipes
                process.kill()
    run = tt.open(tmp_path / "run")
    assert run.statuses[victim] == "interrupted"
    assert run.status == "interrupted"
    assert any(f"rank {victim}, attempt 0: the recording was interrupted" in each for each in run.problems)
    assert any(f"rank {victim} has no record of step" in each for each in run.problems)
    own = run.rank(1 - victim).series("0:output", "count")
    assert own.steps.tolist() == list(range(40))
    both = run.series("0:output", "count")
    assert set(both.values.tolist()) == {96.0}
    assert both.steps.tolist() == run.rank(victim).steps().tolist()
    assert run.series("0:output", "count", partial=True).steps.tolist() == list(range(40))


def test_a_rank_whose_disk_is_full_goes_on_and_what_is_missing_is_told(tmp_path: Path) -> None:
    finish(start("full", tmp_path / "run", 2))
    finish(start("full", tmp_path / "bare", 2))
    for rank in (0, 1):
        losses = [(tmp_path / f"{name}.losses.{rank}").read_text() for name in ("run", "bare")]
        assert losses[0] == losses[1]
    run = tt.open(tmp_path / "run", partial=True)
    # Every value that was flushed before is there, on both ranks; the other rank has all of them.
    assert run.rank(0).steps("0:output").tolist() == list(range(12))
    assert run.rank(1).steps("0:output").tolist() == list(range(4))
    for step in range(12):
        assert run.tensor("0:output", step).shape == ((128, 12) if step < 4 else (64, 12))
    lost = [event for event in run.events() if event.get("kind") == "lost"]
    assert {event.get("rank") for event in lost} == {1}
    assert any("rank 1 has no record of steps 4 to 11" in problem for problem in run.problems)
    assert any("rank 1" in problem and "File too large" in problem for problem in run.problems)


def test_ranks_on_different_hosts_write_into_one_object_store_and_are_read_as_one() -> None:
    with served_bucket() as bucket:
        place = f"{bucket}/world"
        finish(start("remote", place, 2))
        run = tt.open(place)
        assert run.ranks == [0, 1]
        assert run.problems == []
        assert run.status == "closed"
        hosts = {run.rank(rank).manifest["launch"]["host"] for rank in (0, 1)}
        assert hosts == {"host-0", "host-1"}
        assert run.series("0:output", "count").values.tolist() == [2 * 4 * 12.0] * 3
        assert run.tensor("0:param.weight", 2).shape == (12, 6)
        assert run.rank(1).tensor("0:param.weight", 2).shape == (6, 6)
        assert run.tensor("0:output", 1).shape == (8, 12)
