"""``--rank``: one rank of a run of several, in every command that shows one; without it, all of them as one."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result

from torchtap.cli import torchtap
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter

SITES = ("up:output", "up:param.weight")
WORLD = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three ranks, of which the last lacks a step; the sum of absolute values of rank k's part is 100 k + the step."""
    folder = tmp_path_factory.mktemp("ranks") / "run"
    for rank in range(WORLD):
        places = [{"axes": [["dp", WORLD, rank, share]]} for share in ("batch(0)", "replicate")]
        with RunWriter(folder, manifest={}, rank=rank, world=WORLD) as writer:
            writer.event(
                "placements", step=0, phase="train", placements=places, sites={SITES[0]: 0, SITES[1]: 1}
            )
            for step in range(4 if rank < 2 else 3):
                block = ScalarBlock(SITES, ("l1",), _values(rank, step))
                writer.write(StepRecord(step, None, None, "train", 1e9 + step, (block,), ()))
    return str(folder)


def _values(rank: int, step: int) -> npt.NDArray[np.float64]:

    return np.array([[100.0 * rank + step], [7.0]])


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(torchtap, list(arguments))


def test_show_tells_of_one_rank_or_of_all(run: str) -> None:
    whole = json.loads(asked("show", run, "--json").output)
    assert whole["ranks"] == {"0": "closed", "1": "closed", "2": "closed"}
    assert any("rank 2 has no record of step 3" in problem for problem in whole["problems"])
    one = json.loads(asked("show", run, "--json", "--rank", "2").output)
    assert one["steps"] == {"count": 3, "first": 0, "last": 2}
    assert one["problems"] == []


def test_show_prints_the_numbers_of_the_rank(run: str) -> None:
    parts = {rank: asked("show", run, "--rank", str(rank), "--statistic", "l1") for rank in range(WORLD)}
    assert all(part.exit_code == 0 for part in parts.values())
    assert len({part.output for part in parts.values()}) == WORLD
    whole = asked("show", run, "--statistic", "l1").output
    assert "rank 2 has no record of step 3" in re.sub(r"\s+", " ", whole)


def test_tail_follows_one_rank(run: str) -> None:
    def last(*more: str) -> dict[str, object]:
        return json.loads(asked("tail", run, "--once", "--json", *more).output.splitlines()[-1])

    assert last("--rank", "2")["step"] == 2
    assert last("--rank", "1")["step"] == 3


def test_a_report_is_of_one_rank_or_of_all(run: str, tmp_path: Path) -> None:
    held = {}
    for name, more in (("all", []), ("one", ["--rank", "2"])):
        told = asked("report", run, "-o", str(tmp_path / f"{name}.html"), *more)
        assert told.exit_code == 0, told.output
        packed = re.search(
            r'id="torchtap-archive" type="text/plain">([^<]*)<', (tmp_path / f"{name}.html").read_text()
        )
        assert packed is not None
        held[name] = gzip.decompress(base64.b64decode(packed[1]))
    assert b"rank 2 has no record of step 3" in held["all"]
    assert b"rank 2 has no record of step 3" not in held["one"]


@pytest.mark.parametrize("command", ["show", "tail", "report"])
def test_a_rank_that_is_not_there_is_an_error_that_names_those_that_are(
    run: str, command: str, tmp_path: Path
) -> None:
    more = (
        ["--once"] if command == "tail" else ["-o", str(tmp_path / "x.html")] if command == "report" else []
    )
    told = asked(command, run, "--rank", "7", *more)
    assert told.exit_code != 0
    assert "no rank 7; its ranks are [0, 1, 2]" in str(told.exception)
