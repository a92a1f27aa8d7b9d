"""Of three replicas one goes its own way: the finding names it; where all go apart, none is named."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.ranks.odd_one import process
from torch import multiprocessing

import torchtap as tt


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(process, (3, port, str(folder)), nprocs=3)
    return folder


def drifts(run: Path) -> list[tt.Finding]:
    return [finding for finding in tt.diagnose(run) if finding.kind == "ranks-drift"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "corrupted",
            "blocks.1.mlp.up:param.weight was the same on all ranks and rank 2 alone differs from step 1",
        ),
        ("clipped", "was the same on all ranks and rank 1 alone differs from step 1"),
        ("no_sync", "was the same on all ranks and differs from step 1"),
        ("past", "was the same on all ranks and differs from step 1"),
    ],
)
def test_the_rank_that_goes_its_own_way_is_named(runs: Path, name: str, words: str) -> None:
    (found,) = drifts(runs / name)
    assert words in found.message


def test_replicas_that_stay_together_give_no_finding(runs: Path) -> None:
    assert drifts(runs / "healthy") == []
