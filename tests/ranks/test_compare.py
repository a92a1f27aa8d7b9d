"""A training on several processes beside one process: the same where it is, and which rank did what where not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.ranks.faulty import alone, process
from torch import multiprocessing

import torchtap as tt
from torchtap.cli.compare import command


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("compared")
    for world in (2, 4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        multiprocessing.spawn(process, (world, port, str(folder)), nprocs=world)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    alone(folder)
    yield folder
    torch.set_default_dtype(before)


PAIRS = [
    ("alone", "ddp"),
    ("alone", "fsdp"),
    ("alone", "tp"),
    ("stack", "pipeline_gpipe"),
    ("stack", "pipeline_1f1b"),
    ("stack", "pipeline_interleaved"),
    ("pipeline_gpipe", "pipeline_1f1b"),
    ("alone", "hsdp"),
    ("alone", "fsdp_tp"),
    ("tp", "fsdp_tp"),
    ("ddp", "hsdp"),
    ("ddp", "fsdp"),
    ("fsdp", "tp"),
    ("ddp", "alone"),
]


@pytest.mark.parametrize(("reference", "target"), PAIRS)
def test_the_same_training_in_another_layout_is_the_same(runs: Path, reference: str, target: str) -> None:
    found = tt.compare(runs / reference, runs / target)
    assert found.outcome == "same", found.verdict
    left = {row.site for row in found.rows if row.status == "unknown part"}
    assert left <= {"positions:grad_output"}  # a sum over samples of which no rank says so


def test_a_gradient_of_a_ranks_own_loss_says_that_it_is(runs: Path) -> None:
    row = tt.compare(runs / "alone", runs / "ddp").row("head:grad_output")
    assert "2 × the reference's: of each rank's own loss" in row.note


FAULTS = {
    "reduced_twice": (
        ":param_grad",
        0,
        "2 × the reference's on 2 ranks (summed where an average belongs, or reduced twice)",
    ),
    "divided": (":param_grad", 0, "1/2 of the reference's on 2 ranks (averaged twice"),
    "no_sync": (":param_grad", 0, "whose average is the reference's (an all-reduce is missing)"),
    "four_reduced_twice": (
        ":param_grad",
        0,
        "4 × the reference's on 4 ranks (summed where an average belongs, or reduced twice)",
    ),
    "four_divided": (":param_grad", 0, "1/4 of the reference's on 4 ranks (averaged twice"),
    "four_no_sync": (":param_grad", 0, "whose average is the reference's (an all-reduce is missing)"),
    "corrupted": ("blocks.1.mlp.up:", 0, "rank 1 alone of 2"),
    "other_data": ("embed:output", 0, "wrong in the part of rank 1 alone of 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_ranks_did_wrong_is_named(runs: Path, name: str) -> None:
    site, step, words = FAULTS[name]
    found = tt.compare(runs / "one", runs / name)
    assert found.first is not None, found.verdict
    assert site in found.first.site
    assert found.first.step == step
    assert words in found.verdict


def test_the_command_compares_one_rank_of_each(runs: Path) -> None:
    asked = [str(runs / "no_sync"), str(runs / "corrupted")]
    own = CliRunner().invoke(command, [str(runs / "ddp"), str(runs / "ddp"), "--rank", "1", "--quiet"])
    assert own.exit_code == 0, own.output
    told = CliRunner().invoke(command, [*asked, "--rank", "1", "--json"])
    whole = tt.compare(tt.open(asked[0]).rank(1), tt.open(asked[1]).rank(1))
    assert told.exit_code == 1
    assert json.loads(told.output)["first"]["site"] == (whole.first.site if whole.first else None)
    absent = CliRunner().invoke(command, [*asked, "--rank", "7"])
    assert "7" in str(absent.exception)
