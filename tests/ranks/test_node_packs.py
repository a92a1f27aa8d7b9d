"""The ranks of a node record into one file: nothing is lost when one of them is killed, and it reads as folders do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.optional import need
from tests.store.object_store import served_bucket
from tests.store.records import SITES, STATISTICS, image, number, record

import torchtap as tt
from torchtap.placement import Axis, Placement, Share
from torchtap.ranks.packed import fold_in_place
from torchtap.store.files import system
from torchtap.store.write.writer import RunWriter

pytestmark = pytest.mark.skipif(
    not system.has_numbered_locks(), reason="one file cannot hold several locks here"
)

WORLD = 4
_RANK = """
import sys
from tests.store.records import record
from torchtap.store.write.writer import RunWriter
folder, rank, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
writer = RunWriter(folder, manifest={}, rank=rank, world=4, pack=(0, 3), flush_seconds=0.01)
for step in range(steps):
    writer.write(record(step, tensors=1, size=(16, 4096)[step % 2]))
    if step % 5 == 4:
        writer.flush()
        print(step, flush=True)
if rank == 2:
    sys.stdin.read()  # until it is killed
writer.close()
"""


def start(folder: Path, rank: int, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _RANK, str(folder), str(rank), str(steps)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def check(run: tt.Run, steps: list[int]) -> None:
    """Compare a rank's numbers and tensors with those that it was given."""
    assert run.steps().tolist() == steps
    for site, name in enumerate(SITES):
        for kind, statistic in enumerate(STATISTICS):
            assert run.series(name, statistic).values.tolist() == [number(step, site, kind) for step in steps]
    for step in steps:
        assert np.array_equal(run.array(SITES[0], step), image(step, (16, 4096)[step % 2]))


def test_processes_share_a_pack_and_one_that_is_killed_costs_no_one_anything(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks = [start(folder, rank, 60) for rank in range(WORLD)]
    flushed = -1
    while flushed < 39:
        assert ranks[2].stdout is not None
        flushed = int(ranks[2].stdout.readline())
    assert tt.open(folder, rank=2).status == "recording"
    os.kill(ranks[2].pid, signal.SIGKILL)
    for rank in (0, 1, 3):
        assert ranks[rank].communicate()[0].split()[-1] == "59"
        assert ranks[rank].returncode == 0
    ranks[2].communicate()
    assert [file.suffix for file in folder.iterdir()] == [".pack"]
    run = tt.open(folder)
    assert run.ranks == [0, 1, 2, 3]
    assert run.statuses == {0: "closed", 1: "closed", 2: "interrupted", 3: "closed"}
    for rank in (0, 1, 3):
        check(run.rank(rank), list(range(60)))
    left = run.rank(2).steps().tolist()
    assert len(left) > flushed
    check(run.rank(2), list(range(len(left))))
    assert all("rank 2" in problem for problem in run.problems), run.problems


def written(folder: Path, steps: int = 20) -> Path:
    for rank in range(2):
        with RunWriter(folder, manifest={}, rank=rank, world=2, pack=(0, 1)) as writer:
            place = Placement((Axis("dp", 2, rank, Share("batch", 0)),)).to_json()
            sites = dict.fromkeys(SITES, 0)
            writer.event("placements", step=0, phase="train", placements=[place], sites=sites)
            for step in range(steps):
                writer.write(record(step, tensors=1, size=(16, 4096)[step % 2]))
                if step % 3 == 0:
                    writer.flush()
    (pack,) = folder.iterdir()
    return pack


def test_a_second_launch_gets_a_further_attempt_in_the_same_pack(tmp_path: Path) -> None:
    written(tmp_path / "run", 5)
    written(tmp_path / "run", 7)
    run = tt.open(tmp_path / "run")
    assert run.attempts == [0, 1]
    assert run.steps().tolist() == list(range(7))
    assert run.rank(1).series(SITES[0], "std").values.tolist() == [number(step, 0, 1) for step in range(7)]


def test_a_pack_without_its_index_and_with_a_torn_frame_is_read_by_its_heads(tmp_path: Path) -> None:
    pack = written(tmp_path / "run")
    content = pack.read_bytes()
    at = content.rindex(b"index.json")
    pack.write_bytes(content[: at - 24] + b"\0" * 80 + content[at - 24 : at + 10])  # reserved, then torn
    run = tt.open(tmp_path / "run")
    for rank in (0, 1):
        check(run.rank(rank), list(range(20)))
    assert run.problems == []


def test_a_damaged_head_costs_its_own_file(tmp_path: Path) -> None:
    pack = written(tmp_path / "run")
    content = bytearray(pack.read_bytes())
    content[-1] ^= 1  # the index
    at = content.index(b"rank-00000/attempt-0000/events-")
    content[at] ^= 1
    pack.write_bytes(content)
    run = tt.open(tmp_path / "run")
    check(run.rank(1), list(range(20)))
    check(run.rank(0), list(range(20)))
    assert any("events" in problem for problem in run.problems)


def test_rewritten_files_give_their_room_back(tmp_path: Path) -> None:
    pack = written(tmp_path / "run", 200)
    with open(pack, "rb") as file:
        os.fsync(file)
    held = pack.stat().st_blocks * 512
    assert held < 2 * 2 * 200 * (image(0, 4096).nbytes + 400)


def test_a_reader_follows_a_pack_while_it_grows(tmp_path: Path) -> None:
    child = start(tmp_path / "run", 0, 100)
    seen: list[int] = []
    while child.poll() is None:
        if any(tmp_path.glob("run/*.pack")):
            try:
                run = tt.open(tmp_path / "run", rank=0)
            except tt.TorchtapError:
                continue  # before its manifest
            if not len(run.steps()):
                continue
            steps, values = run.series(SITES[0], "std")
            assert steps[: len(seen)].tolist() == seen
            assert values.tolist() == [number(step, 0, 1) for step in steps.tolist()]
            seen = steps.tolist()
        time.sleep(0.01)
    child.communicate()
    check(tt.open(tmp_path / "run", rank=0), list(range(100)))


def test_a_large_launch_packs_if_the_launcher_names_the_ranks_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for world in (8, 64):
        with RunWriter(tmp_path / str(world), manifest={}, rank=1, world=world) as writer:
            writer.write(record(0))
    assert [file.name for file in (tmp_path / "8").iterdir()] == ["rank-00001"]
    (pack,) = (tmp_path / "64").iterdir()
    assert pack.name.startswith("ranks-00000-00007-")
    assert tt.open(tmp_path / "64", rank=1).steps().tolist() == [0]


def test_the_fold_beside_a_recording_gives_the_same_and_goes_with_the_next_recording(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    written(folder)
    before = tt.open(folder)
    fold_in_place(tt.open(folder))
    after = tt.open(folder)
    for site in SITES:
        ours, theirs = after.series(site, "max"), before.series(site, "max")
        assert ours.steps.tolist() == theirs.steps.tolist() == list(range(20))
        assert ours.values.tolist() == theirs.values.tolist()
    check(after.rank(1), list(range(20)))
    with RunWriter(folder, manifest={}, rank=0, world=2, pack=(0, 1)) as writer:
        writer.write(record(30))
    assert tt.open(folder).steps().tolist() == [*range(20), 30]


def test_a_series_of_many_ranks_takes_few_requests_of_an_object_store(tmp_path: Path) -> None:
    """The 64 ranks of eight nodes, in an object store that speaks S3: their number costs nothing."""
    s3fs = need("s3fs")
    folder = tmp_path / "run"
    patch = pytest.MonkeyPatch()
    patch.setattr("os.fsync", lambda descriptor: None)
    for rank in range(64):
        node = rank // 8 * 8
        with RunWriter(folder, manifest={}, rank=rank, world=64, pack=(node, node + 7)) as writer:
            place = Placement((Axis("dp", 64, rank, Share("batch", 0)),)).to_json()
            writer.event(
                "placements", step=0, phase="train", placements=[place], sites=dict.fromkeys(SITES, 0)
            )
            for step in range(5):
                writer.write(record(step))
    fold_in_place(tt.open(folder))
    here = tt.open(folder).series(SITES[0], "max")
    requests: list[str] = []
    real = s3fs.S3FileSystem._call_s3

    async def counted(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        requests.append(method)
        return await real(self, method, *arguments, **options)

    with served_bucket() as bucket:
        import fsspec

        fsspec.filesystem("s3").put(str(folder), f"{bucket}/run", recursive=True)
        patch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
        run = tt.open(f"{bucket}/run")
        found = run.series(SITES[0], "max")
        assert found.values.tolist() == here.values.tolist()
        first = len(requests)
        assert first <= 50, requests
        run.series(SITES[1], "max")
        assert len(requests) - first <= 5
        requests.clear()
        assert run.rank(63).series(SITES[1], "max").values.tolist() == [
            number(step, 1, 2) for step in range(5)
        ]
        assert len(requests) <= 50, requests
        patch.undo()
