"""What a reader does with several ranks' parts, against the whole: no processes, only arithmetic and grammar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard, _StridedShard

import torchtap as tt
from torchtap._torch_distributed import MeshAxis, _boxes
from torchtap.errors import PlanError
from torchtap.placement import Axis, Box, Placement, Share, placement_of, read_layout
from torchtap.ranks.fold import RankFold, needed, quantile, share_of, share_out, way_of
from torchtap.ranks.launches import find_launches
from torchtap.store.files.folder import LocalFolder
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

STATISTICS = ("count", "mean", "std", "min", "max", "absmax", "l1", "l2", "rms", "zeros", "nans", "infs")


def parts_of(kind: str) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(3)
    values = torch.randn(60, generator=source, dtype=torch.float64)
    if kind == "far":  # a mean far above the spread
        values = values + 1e8
    if kind == "broken":
        values[[3, 40]] = torch.nan
        values[[10]] = torch.inf
        values[20:40] = 0
    if kind == "empty":
        return [values[:0], values[:1], values[1:], values[:0]]
    if kind == "nothing finite":
        return [torch.full((4,), torch.nan, dtype=torch.float64), values]
    return list(values.split([7, 20, 1, 32]))


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("kind", ["plain", "far", "broken", "empty", "nothing finite"])
def test_every_statistic_of_parts_folds_to_that_of_the_whole(kind: str, statistic: str) -> None:
    parts, stats = parts_of(kind), tt.Stats()
    whole = float(stats.result(stats.update(None, torch.cat(parts)))[statistic])
    fold = RankFold(statistic, way_of(statistic), (1, 1))
    for part in parts:
        own = stats.result(stats.update(None, part))
        fold.add({name: np.array([[float(own[name])]]) for name in needed(statistic)})
    values, there = fold.result(len(parts))
    assert there.all()
    np.testing.assert_allclose(values[0, 0], whole, rtol=1e-9, equal_nan=True)


@pytest.mark.parametrize("at", [0.0, 0.25, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("kind", ["plain", "broken", "empty"])
def test_a_quantile_of_sketches_is_that_of_one_process(kind: str, at: float) -> None:
    parts, kept = parts_of(kind), tt.Quantiles(at=(at,))
    sketches = [kept.to_merge(kept.update(None, part))["sketch"].numpy() for part in parts]
    (name,), (expected,) = zip(*kept.result(kept.update(None, torch.cat(parts))).items(), strict=True)
    share = share_of(name)
    assert share == pytest.approx(at)
    assert quantile(sketches, share) == float(expected)


@pytest.mark.parametrize("size", [8, 12, 13, 3])
@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(1)),
    ],
)
def test_boxes_are_where_torch_puts_the_shards(size: int, placements: tuple[Any, ...]) -> None:
    shape, mesh = (size, 7), (2, 2)
    rows = torch.arange(size * 7).reshape(shape)
    seen: list[int] = []
    for first in range(2):
        for second in range(2):
            axes = MeshAxis("a", (0, 2), first), MeshAxis("b", (0, 1), second)
            boxes = _boxes(shape, axes, placements)
            sizes, offset = _compute_local_shape_and_global_offset(shape, mesh, [first, second], placements)
            held = [rows[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] for box in boxes]
            assert sum(each.numel() for each in held) == sizes[0] * sizes[1]
            if sizes[0] * sizes[1]:
                assert boxes[0].offset == tuple(offset)
            seen += [number for each in held for number in each.flatten().tolist()]
    assert sorted(seen) == list(range(size * 7))


def test_a_placement_survives_its_json_and_strangers_are_refused() -> None:
    axes = (Axis("dp", 2, 1, Share("shard", 0)), Axis("tp", 4, 3, Share("partial", op="sum")))
    placed = Placement(axes, (16, 8), (Box((8, 0), (8, 8)),), stage="reduced", root=4)
    assert placement_of(placed.to_json()) == placed
    for wrong in (
        {},
        {"axes": [["dp", 2, 2, "batch"]]},
        {"axes": [["dp", 2, 0, "shard(x y)"]]},
        {"axes": [], "shape": [4], "boxes": [[[3], [2]]]},
        {"axes": [], "shape": [-1]},
        {"axes": [], "boxes": [[[0], [1]]]},
    ):
        assert placement_of(wrong) is None


def test_what_a_user_writes_of_a_layout_is_read_or_refused_with_the_way_to_write_it() -> None:
    assert [str(each.share) for each in read_layout("batch(dp); shard(-1, tp)")] == ["batch(0)", "shard(-1)"]
    for wrong in ("", "sharded", "shard(tp)", "shard(1)", "batch(", "partial"):
        with pytest.raises(PlanError, match="write 'batch', 'replicated', 'shard"):
            read_layout(wrong)


def test_of_replicas_one_counts_and_an_unknown_axis_with_one_place_does_not_matter() -> None:
    def at(replica: int, shard: int, *, stage: int = 0) -> Placement:
        axes = (
            Axis("pp", 2, stage, Share("unknown")),
            Axis("replicate", 2, replica, Share("replicate")),
            Axis("shard", 2, shard, Share("shard", 0)),
        )
        return Placement(axes)

    sharing = share_out({0: at(0, 0), 1: at(0, 1), 2: at(1, 0), 3: at(1, 1)})
    assert sharing.parts == ((0, 2), (1, 3))
    assert (sharing.expected, sharing.missing, sharing.why_own) == (2, (), None)
    lacking = share_out({0: at(0, 0), 2: at(1, 0)})
    assert (lacking.parts, lacking.expected, lacking.missing) == (((0, 2),), 2, ("shard 1",))
    mixed = share_out({0: at(0, 0), 1: at(0, 1), 4: at(0, 0, stage=1)})
    assert mixed.why_own == "unknown"
    assert mixed.parts == ((0,), (1,))


def test_attempts_of_one_launch_are_found_by_what_their_processes_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for restart, world in ((0, 3), (1, 2), (2, 3)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        for rank in range(world):
            RunWriter(tmp_path, manifest={}, rank=rank, world=world).close()
    launches = find_launches(LocalFolder(str(tmp_path)), range(3))
    assert [(each.world, each.attempts) for each in launches] == [
        (3, {0: 0, 1: 0, 2: 0}),
        (2, {0: 1, 1: 1}),
        (3, {0: 2, 1: 2, 2: 1}),
    ]
    assert [each.absent for each in launches] == [[], [], []]


# --- sums over ranks ----------------------------------------------------------------------------------------------


def placed_sum(rank: int, op: str = "sum") -> Placement:
    """Rank = 2 * dp + tp: samples along dp, summands along tp."""
    return Placement(
        (Axis("dp", 2, rank // 2, Share("batch", 0)), Axis("tp", 2, rank % 2, Share("partial", op=op)))
    )


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_of_a_sum_over_ranks_the_mean_is_exact_and_all_other_statistics_are_marked(
    tmp_path: Path, op: str
) -> None:
    numbers = np.random.default_rng(0).normal(size=(2, 2, 5, 3))  # dp, tp, samples, width
    numbers[1] *= 3
    whole = numbers.sum(1) if op == "sum" else numbers.mean(1)
    names = ("count", "nans", "infs", "mean", "l2", "absmax")
    for rank in range(4):
        own = numbers[rank // 2, rank % 2][: 5 if rank < 2 else 2]  # the second half of the batch is smaller
        row = [own.size, 0, 0, own.mean(), np.linalg.norm(own), np.abs(own).max()]
        with RunWriter(tmp_path, manifest={}, rank=rank, world=4) as writer:
            placed = [placed_sum(rank, op).to_json()]
            writer.event("placements", step=0, phase="train", placements=placed, sites={"a:output": 0})
            block = ScalarBlock(("a:output",), names, np.array([row]))
            writer.write(StepRecord(0, None, None, "train", 0.0, (block,), ()))
    run = tt.open(tmp_path)
    whole = np.concatenate([whole[0].ravel(), whole[1][:2].ravel()])
    assert run.series("a:output", "mean").values == pytest.approx([whole.mean()], rel=1e-12)
    assert run.series("a:output", "count").values.tolist() == [whole.size]
    marks = {name: run.is_whole("a:output", name) for name in names}
    assert marks == {"count": True, "nans": False, "infs": False, "mean": True, "l2": False, "absmax": False}
    assert run.rank(3).is_whole("a:output", "l2")


def test_the_mean_of_a_sum_is_left_out_if_a_summand_is_not_finite_or_missing(tmp_path: Path) -> None:
    names = ("count", "nans", "infs", "mean")
    for rank in range(4):
        with RunWriter(tmp_path, manifest={}, rank=rank, world=4) as writer:
            placed = [placed_sum(rank).to_json()]
            writer.event("placements", step=0, phase="train", placements=placed, sites={"a:output": 0})
            for step in range(3):
                row = [4, float(rank == 1 and step == 1), 0, 0.5 + rank]
                if rank < 3 or step < 2:
                    block = ScalarBlock(("a:output",), names, np.array([row], float))
                    writer.write(StepRecord(step, None, None, "train", 0.0, (block,), ()))
    assert tt.open(tmp_path).series("a:output", "mean").steps.tolist() == [0]
    assert tt.open(tmp_path).series("a:output", "mean").values.tolist() == [(0.5 + 2.5) / 2 + (1.5 + 3.5) / 2]


def test_comparing_statistics_of_summands_with_those_of_the_whole_accuses_nobody(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(2, 24))
    for name, world in (("one", 1), ("two", 2)):
        for rank in range(world):
            own = values.sum(0) if world == 1 else values[rank]
            row = [own.size, 0, 0, own.mean(), np.linalg.norm(own), np.abs(own).max()]
            with RunWriter(tmp_path / name, manifest={}, rank=rank, world=world) as writer:
                if world > 1:
                    placed = [Placement((Axis("tp", 2, rank, Share("partial", op="sum")),)).to_json()]
                    writer.event(
                        "placements", step=0, phase="train", placements=placed, sites={"a:output": 0}
                    )
                names = ("count", "nans", "infs", "mean", "l2", "absmax")
                block = ScalarBlock(("a:output",), names, np.array([row]))
                writer.write(StepRecord(0, None, None, "train", 0.0, (block,), ()))
    found = tt.compare(tmp_path / "one", tmp_path / "two")
    assert found.outcome != "differs", found.verdict
    assert found.row("a:output").status == "unknown part"
