"""A packed run reads as the run that it was packed from, with few files and few of them opened."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import torchtap as tt
from torchtap.errors import TorchtapError
from torchtap.placement import Axis, Placement, Share
from torchtap.sinks.export import export_run
from torchtap.store.files import system
from torchtap.store.read.reader import is_run
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem
from torchtap.store.write.writer import RunWriter

STATISTICS = ("count", "nans", "infs", "mean", "l2")
SITES = ("a:output", "a:param.weight", "b:output")
WORLD = 150


def record(rank: int, step: int, shift: float) -> StepRecord:
    """Rank's numbers of a step; every third step lacks a site on every rank."""
    own = np.random.default_rng([rank, step]).normal(size=(3, 4)) + shift
    own[1] = step + shift  # the parameter is the same on all ranks
    rows = [[4, 0, 0, each.mean(), np.linalg.norm(each)] for each in own]
    here = np.array([True, True, step % 3 != 0])
    items = (
        (TensorItem("a:output", "value", "full", torch.tensor(own[:1])),) if rank < 2 or rank > 140 else ()
    )
    phase = "eval" if step == 4 else "train"
    return StepRecord(
        step, 0, None, phase, float(step), (ScalarBlock(SITES, STATISTICS, np.array(rows), here),), items
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two launches of 150 ranks: steps 0 to 5, then 3 to 7 again."""
    folder = tmp_path_factory.mktemp("packed")
    patch = pytest.MonkeyPatch()
    patch.setattr("os.fsync", lambda descriptor: None)
    for launch, steps in enumerate((range(6), range(3, 8))):
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(launch))
        for rank in range(WORLD):
            batch = Placement((Axis("dp", WORLD, rank, Share("batch", 0)),)).to_json()
            same = Placement((Axis("dp", WORLD, rank, Share("replicate")),)).to_json()
            with RunWriter(folder / "run", manifest={"plan": {}}, rank=rank, world=WORLD) as writer:
                sites = {"a:output": 0, "a:param.weight": 1, "b:output": 0}
                writer.event("placements", step=0, phase="train", placements=[batch, same], sites=sites)
                if rank in (0, 7):
                    writer.event("warning", message=f"of rank {rank}")
                for step in steps:
                    writer.write(record(rank, step, float(launch)))
    patch.undo()
    return folder / "run", export_run(tt.open(folder / "run"), "packed", folder / "packed")


def test_a_packed_run_has_the_same_numbers_steps_sites_and_events(runs: tuple[Path, Path]) -> None:
    plain, packed = (tt.open(path) for path in runs)
    assert is_run(runs[1])
    assert packed.ranks == plain.ranks
    assert packed.sites() == plain.sites()
    assert packed.phases == plain.phases
    assert packed.attempts == plain.attempts
    assert packed.steps().tolist() == plain.steps().tolist()
    assert packed.problems == plain.problems == []
    assert packed.statuses == plain.statuses
    assert np.array_equal(packed.clock(), plain.clock())
    assert [event["message"] for event in packed.events("warning")] == [
        event["message"] for event in plain.events("warning")
    ]
    for site in SITES:
        assert packed.statistics(site) == plain.statistics(site)
        for statistic in STATISTICS:
            for phase in plain.phases:
                ours, theirs = (run.series(site, statistic, phase) for run in (packed, plain))
                assert ours.steps.tolist() == theirs.steps.tolist()
                assert ours.values == pytest.approx(theirs.values, rel=1e-12, abs=1e-12)
    ours, theirs = packed.table(), plain.table()
    assert [row[:-1] for row in ours] == [row[:-1] for row in theirs]
    assert ours.value == pytest.approx(theirs.value, rel=1e-12, abs=1e-12)
    assert np.allclose(packed.matrix("l2").values, plain.matrix("l2").values, rtol=1e-12, equal_nan=True)


def test_ranks_tensors_and_placements_of_a_packed_run_are_read_from_the_packs(
    runs: tuple[Path, Path],
) -> None:
    plain, packed = (tt.open(path) for path in runs)
    for rank in (0, 64, 149):
        one, other = packed.rank(rank), plain.rank(rank)
        assert (
            one.series("a:output", "mean").values.tolist() == other.series("a:output", "mean").values.tolist()
        )
        assert one.manifest == other.manifest
    assert torch.equal(packed.rank(1).tensor("a:output", 5), plain.rank(1).tensor("a:output", 5))
    assert packed.placement("a:output") == plain.placement("a:output")
    assert packed.is_whole("a:output", "l2")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    real = system.open_below
    monkeypatch.setattr(system, "open_below", lambda *where: names.append(where[-1]) or real(*where))
    return names


def test_a_series_of_a_packed_run_opens_no_rank(runs: tuple[Path, Path], opened: list[str]) -> None:
    assert len([path for path in runs[1].rglob("*") if path.is_file()]) < 20
    run = tt.open(runs[1])
    run.series("a:output", "mean")
    run.sites(), run.steps(), run.matrix("l2")
    assert not any(name.endswith(".pack") for name in opened)
    assert len(opened) <= 50


@pytest.mark.parametrize("damage", ["cut", "flip", "length"])
def test_a_damaged_pack_costs_what_is_damaged_and_the_fold_stays_readable(
    runs: tuple[Path, Path], tmp_path: Path, damage: str
) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(runs[1], copy)
    pack = next(copy.glob("ranks-00000-*.pack"))
    content = bytearray(pack.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[200] ^= 1
    else:
        content[:8] = (2**62).to_bytes(8, "little")
    pack.write_bytes(content)
    run = tt.open(copy)
    assert len(run.series("a:output", "mean").steps) == 7
    plain, sound = tt.open(runs[0]), 0
    for rank in range(64):
        with suppress(TorchtapError):  # never a wrong number
            found = run.rank(rank).series("a:output", "mean")
            theirs = plain.rank(rank).series("a:output", "mean")
            assert set(found.values.tolist()) <= set(theirs.values.tolist())
            sound += found.values.tolist() == theirs.values.tolist()
    assert sound >= (28 if damage == "cut" else 63)
