"""Trainings on several processes, read as one: what one process records on the joined batch, and no bit changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.cases import CASES, STEPS, TAPS, alone, launch, made, small
from tests.ranks.models import Stack, batch
from tests.ranks.same import differences, unknown

import torchtap as tt

PIPELINES = ("pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved")
DOCTORED = ("ddp_doctor", "fsdp_doctor")
SUMMED_OVER_SAMPLES = "positions:grad"  # its gradient is a sum over samples, which no rank has whole


@pytest.fixture(scope="module", autouse=True)
def _double() -> Iterator[None]:
    """Sums of parts round otherwise than sums of the whole; in float64 that is far below what is promised."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, run by one group of two processes and one of four."""
    path = tmp_path_factory.mktemp("ranks")
    for world in (2, 4):
        launch(path, [name for name, (processes, _) in CASES.items() if processes == world], world)
    return path


def references(name: str) -> dict[str, Any]:
    """How one process trains the same."""
    return {
        "ddp_accumulation": {"micro": 2},
        "ddp_unused": {"model": made(unused=True)},
        "ddp_compiled": {"taps": [tt.tap(["*:output", "*:param_grad"])]},
        "ddp_inductor": {"model": small(), "taps": [tt.tap(["*:output", "*:param_grad"])]},
        "fsdp_kept": {"clip": 0.05},
        "fsdp_uneven": {"model": made(hidden=13)},
        "tp_dtensors": {"model": made(hidden=13)},
        "fsdp_forward_only": {"forward_only": (1,)},
    }.get(name, {})


@pytest.mark.parametrize("name", CASES)
def test_a_watch_changes_no_bit_of_any_gradient_on_any_rank(folder: Path, name: str) -> None:
    for rank in range(CASES[name][0]):
        told = json.loads((folder / f"{name}.{rank}.json").read_text())
        assert told.get("differ") == [], told
        assert told["gradients"] > 0


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in (*PIPELINES, "fsdp_mixed", "ddp_stages", *DOCTORED)]
)
def test_all_ranks_together_are_what_one_process_records_on_the_joined_batch(
    folder: Path, name: str, tmp_path: Path
) -> None:
    alone(tmp_path / "alone", **references(name))
    world = tt.open(folder / name)
    assert world.problems == []
    assert world.status == "closed"
    ranks = CASES[name][0]
    parts = 1 if name.startswith("tp") else 2 if name == "fsdp_tp" else ranks
    partial = [
        site for site in world.sites() if any(a.share.kind == "partial" for a in world.placement(site).axes)
    ]
    skip = (SUMMED_OVER_SAMPLES, *(partial if name == "tp_sequence" else ()))
    assert differences(world, tt.open(tmp_path / "alone"), own_loss=parts, skip=skip) == []


def test_parts_of_a_sum_are_added_where_they_are_tensors(folder: Path, tmp_path: Path) -> None:
    alone(tmp_path / "alone")
    one, world = tt.open(tmp_path / "alone"), tt.open(folder / "tp_sequence")
    site = "blocks.0.norm:param_grad.weight"
    assert str(world.placement(site).axes[0].share) == "partial(sum)"
    for step in range(STEPS):
        assert torch.allclose(world.tensor(site, step), one.tensor(site, step), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_keep_the_names_of_the_whole_and_record_each_micro_batch_once(
    folder: Path, name: str, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tt.watch(model, tmp_path / "alone", TAPS) as watch:
        for step in range(STEPS):
            x, _ = batch(step)
            with watch.step():
                optimizer.zero_grad()
                for own, target in zip(x.chunk(4), x.roll(1).chunk(4), strict=True):
                    (torch.nn.functional.mse_loss(model(own), target) / 4).backward()
                optimizer.step()
    world, one = tt.open(folder / name), tt.open(tmp_path / "alone")
    assert {site for site in world.sites() if site.startswith("layers.")} == {
        site for site in one.sites() if site.startswith("layers.")
    }
    # The gradient of the last layer's output is that of each stage's own loss; a schedule scales it afterwards.
    assert differences(world, one, own_loss=4, skip=(":output.", *_roots(one))) == []
    assert world.problems == []


def _roots(run: tt.Run) -> tuple[str, ...]:
    return tuple(site for site in run.sites() if not site.startswith("layers."))


def test_a_gradient_is_had_before_and_after_ranks_average_it(folder: Path) -> None:
    run = tt.open(folder / "ddp_stages")
    for path in ("embed", "blocks.1.mlp.down"):
        local, reduced = f"{path}:param_grad_local.weight", f"{path}:param_grad.weight"
        assert str(run.placement(local).axes[0].share) == "partial(avg)"
        assert (run.placement(local).stage, run.placement(reduced).stage) == ("local", "reduced")
        for step in range(STEPS):
            own = [run.rank(rank).tensor(local, step) for rank in (0, 1)]
            assert not torch.allclose(own[0], own[1])
            whole = run.tensor(reduced, step)
            assert torch.allclose((own[0] + own[1]) / 2, whole, rtol=1e-12, atol=1e-14)
            assert torch.allclose(run.tensor(local, step), whole, rtol=1e-12, atol=1e-14)


def test_what_nobody_knows_is_said_to_be_unknown(folder: Path) -> None:
    assert unknown(tt.open(folder / "ddp")) == ["positions:output", "positions:grad_output"]
    assert unknown(tt.open(folder / "fsdp")) == ["positions:output", "positions:grad_output"]
    assert "embed:output" in unknown(tt.open(folder / "tp"))
    assert not [site for site in unknown(tt.open(folder / "tp")) if ".mlp.up" in site or ":param" in site]


def test_a_shard_says_where_it_lies(folder: Path) -> None:
    world = tt.open(folder / "fsdp_tp")
    site = "blocks.0.mlp.up:param.weight"
    first, last = world.rank(0).placement(site), world.rank(3).placement(site)
    assert first.shape == (12, 8)
    assert [str(axis.share) for axis in first.axes] == ["shard(0)", "shard(0)"]
    assert [(axis.name, axis.size, axis.at) for axis in last.axes] == [("dp", 2, 1), ("tp", 2, 1)]
    assert first.boxes[0].offset == (0, 0)
    assert last.boxes[0].offset == (9, 0)
    assert world.tensor(site, 0).shape == (12, 8)
    assert world.rank(0).tensor(site, 0).shape == (3, 8)
    assert world.series(site, "count").values.tolist() == [96.0] * STEPS


def test_parameters_are_counted_in_the_same_state_at_every_step(folder: Path) -> None:
    run = tt.open(folder / "fsdp_forward_only")
    assert run.series("embed:param.weight", "count").values.tolist() == [64.0] * STEPS
    assert run.rank(0).series("embed:param.weight", "count").values.tolist() == [32.0] * STEPS


def test_mixed_precision_gives_values_in_the_precision_of_each(folder: Path) -> None:
    run = tt.open(folder / "fsdp_mixed")
    assert run.tensor("blocks.0.mlp.up:output", 0).dtype == torch.bfloat16
    assert run.tensor("blocks.0.mlp.up:param.weight", 0).dtype == torch.float64
    assert run.tensor("blocks.0.mlp.up:output", 0).shape == (8, 6, 12)
    assert run.problems == []


def test_a_rank_without_an_element_of_a_parameter_says_so(folder: Path) -> None:
    told = {
        each["reason"]
        for rank in (0, 1)
        for each in tt.open(folder / "fsdp1", rank=rank).coverage()["missing"]
    }
    assert any("no element of the parameter" in reason for reason in told)
    assert not any("frozen" in reason for reason in told)


def test_a_table_has_each_number_of_the_whole_once(folder: Path) -> None:
    run = tt.open(folder / "hsdp")
    table = run.table(["embed:output", "embed:param.weight"], ["count", "l2"])
    assert len(table) == 2 * 2 * STEPS
    counts = table["value"][table["statistic"] == "count"]
    assert sorted(set(counts.tolist())) == [64.0, 384.0]


@pytest.mark.parametrize("name", CASES)
def test_a_healthy_training_has_no_finding_about_ranks(folder: Path, name: str) -> None:
    found = tt.diagnose(folder / name)
    assert [str(each) for each in found if each.kind.startswith("rank")] == []
    assert [each for each in found.unjudged if "raised" in each.reason] == []
