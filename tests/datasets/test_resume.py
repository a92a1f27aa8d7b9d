"""Interrupted harvests and engines: the files are always those of one uninterrupted process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.datasets.kills import digests
from tests.datasets.models import SITES, TinyLM, documents, tiny
from tests.optional import need
from torch import Tensor

import torchtap as tt
from torchtap.errors import SessionError


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX")
def test_a_harvest_that_was_killed_again_and_again_has_the_bytes_of_one_that_was_not() -> None:
    words = [sys.executable, "-m", "tests.datasets.kills", "4", "here", "2"]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert "every file as without" in done.stdout, done.stderr


@pytest.mark.parametrize("engine", ["processes", "dask"])
def test_two_processes_and_dask_write_the_files_of_one_process(engine: str, tmp_path: Path) -> None:
    if engine == "dask":
        need("dask")
    data = [*documents(60), *documents(20)]
    tt.harvest(tiny(), data, SITES, tmp_path / "one", window=8, covariance=True)
    tt.harvest(tiny, data, SITES, tmp_path / "two", window=8, covariance=True, engine=engine, workers=2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_any_shards_may_be_missing_when_a_harvest_goes_on(tmp_path: Path) -> None:
    """Workers commit out of order, so an interruption may leave holes."""
    data = [*documents(60), *documents(20)]
    tt.harvest(tiny(), data, SITES, tmp_path / "one", window=8)
    wanted = digests(tmp_path / "one")
    for source in (data, iter(data)):
        for name in ("shard-000000", "shard-000003", "shard-000009"):
            (tmp_path / "one" / f"{name}.safetensors").unlink()
        (tmp_path / "one" / "index.json").unlink()
        tt.harvest(tiny(), source, SITES, tmp_path / "one", window=8)
        assert digests(tmp_path / "one") == wanted


class Dying(TinyLM):
    """Kills its process when it meets a token, unless a file says that it did so before."""

    def __init__(self, marker: str, always: bool) -> None:
        super().__init__()
        self.marker, self.always = marker, always

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if bool((input_ids == 49).any()) and (self.always or not os.path.exists(self.marker)):
            open(self.marker, "w").close()
            os.kill(os.getpid(), 9)
        return super().forward(input_ids, attention_mask)


def dying(marker: Path, always: bool) -> Dying:
    torch.manual_seed(0)
    return Dying(str(marker), always).eval()


def test_a_worker_process_that_dies_is_a_clear_error_and_nothing_is_lost(tmp_path: Path) -> None:
    data = documents(40)
    marker = tmp_path / "died"
    with pytest.raises(SessionError, match=r"a worker process died.*harvest again"):
        tt.harvest(dying(marker, False), data, SITES, tmp_path / "acts", window=4, workers=2)
    tt.harvest(dying(marker, False), data, SITES, tmp_path / "acts", window=4)
    tt.harvest(dying(marker, False), data, SITES, tmp_path / "plain", window=4)
    assert digests(tmp_path / "acts") == digests(tmp_path / "plain")


on_ray = pytest.mark.filterwarnings("ignore")  # its own deprecations


@pytest.fixture(scope="module")
def cluster() -> Any:
    ray = need("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


@on_ray
def test_ray_writes_the_same_files_also_if_a_worker_dies(cluster: Any, tmp_path: Path) -> None:
    data = [*documents(60), *documents(20)]
    (tmp_path / "before").touch()
    tt.harvest(dying(tmp_path / "before", False), data, SITES, tmp_path / "one", window=8)
    tt.harvest(
        dying(tmp_path / "died", False), data, SITES, tmp_path / "ray", window=8, engine="ray", workers=2
    )
    assert (tmp_path / "died").exists()
    assert digests(tmp_path / "ray") == digests(tmp_path / "one")


@on_ray
def test_a_ray_worker_that_always_dies_is_a_clear_error_and_nothing_is_lost(
    cluster: Any, tmp_path: Path
) -> None:
    data = documents(40)
    with pytest.raises(SessionError, match=r"(?s)a Ray worker failed.*harvest again"):
        tt.harvest(
            dying(tmp_path / "x", True), data, SITES, tmp_path / "acts", window=4, engine="ray", workers=2
        )
    safe = tt.open_activations(tmp_path / "acts")
    assert not safe.complete
    safe.verify()
    tt.harvest(dying(tmp_path / "x", False), data, SITES, tmp_path / "acts", window=4)
    tt.harvest(dying(tmp_path / "x", False), data, SITES, tmp_path / "plain", window=4)
    assert digests(tmp_path / "acts") == digests(tmp_path / "plain")


@on_ray
def test_an_error_of_the_plan_comes_through_ray_as_itself(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(tt.SelectionError, match="fourth"):
        tt.harvest(tiny(), documents(4), "fourth:output", tmp_path / "acts", engine="ray")
