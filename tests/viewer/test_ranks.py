"""A run of several ranks: which rank differs from the others, where, and whether it may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.viewer.browsing import Visit
from tests.viewer.wire import unpack

from torchtap.placement import Axis, Placement, Share
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter
from torchtap.viewer.open_run import Refused
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import ViewerServer, answer

SITES = ("a:output", "a:param.weight", "b:param.weight")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks of a DDP training; from step 3 on, rank 2 has another ``b:param.weight``."""
    folder = tmp_path_factory.mktemp("ranks") / "run"
    for rank in range(3):
        samples = Placement((Axis("dp", 3, rank, Share("batch")),)).to_json()
        same = Placement((Axis("dp", 3, rank, Share("replicate")),)).to_json()
        with RunWriter(folder, rank=rank, world=3, manifest={}) as writer:
            writer.event(
                "placements",
                step=0,
                phase="train",
                placements=[samples, same],
                sites={"a:output": 0, "a:param.weight": 1, "b:param.weight": 1},
            )
            for step in range(5):
                moved = 0.25 if rank == 2 and step >= 3 else 0.0
                values = np.array([[1.0 + rank], [4.0 + step], [8.0 + moved]])
                writer.write(
                    StepRecord(step, None, None, "train", 0.0, (ScalarBlock(SITES, ("absmax",), values),), ())
                )
    return folder


def ask(run: Path, **asked: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return unpack(answer(Catalog.open([run]), "ranksat", {"run": "run", "statistic": "absmax", **asked}))


def test_every_site_has_each_ranks_own_number_at_the_step(run: Path) -> None:
    facts, arrays = ask(run, step="3")
    assert facts["ranks"] == [0, 1, 2]
    assert facts["step"] == 3
    assert facts["statuses"] == ["closed"] * 3
    assert dict(zip(facts["sites"], facts["shares"], strict=True)) == {
        "a:output": "parts",
        "a:param.weight": "same",
        "b:param.weight": "same",
    }
    rows = dict(zip(facts["sites"], arrays["values"].tolist(), strict=True))
    assert rows == {
        "a:output": [1, 2, 3],
        "a:param.weight": [7, 7, 7],
        "b:param.weight": [8, 8, 8.25],
    }


def test_without_a_step_it_is_the_last_one_and_a_kind_is_kept_to(run: Path) -> None:
    facts, _ = ask(run, kind="param")
    assert facts["step"] == 4
    assert facts["sites"] == ["a:param.weight", "b:param.weight"]


def test_of_very_many_ranks_none_is_left_out(tmp_path: Path) -> None:
    for rank in range(300):
        with RunWriter(tmp_path / "run", rank=rank, world=300, manifest={}, flush_seconds=1e9) as writer:
            for step in range(2):
                values = np.array([[9.0 if rank == 290 else 1.0]])
                block = ScalarBlock(("a:param.weight",), ("absmax",), values)
                writer.write(StepRecord(step, None, None, "train", 0.0, (block,), ()))
    facts, arrays = ask(tmp_path / "run")
    assert len(facts["ranks"]) == 300
    assert np.flatnonzero(arrays["values"][0] == 9).tolist() == [290]
    asked = {"run": "run", "statistic": "absmax", "site": "a:param.weight"}
    facts, arrays = unpack(answer(Catalog.open([tmp_path / "run"]), "ranks", asked))
    assert len(facts["ranks"]) == len(arrays["high"]) <= 256
    (row,) = np.flatnonzero((arrays["high"] == 9).all(axis=1))
    assert facts["ranks"][row] <= 290 < (*facts["ranks"], 300)[row + 1]


def test_a_run_of_one_rank_has_no_ranks_to_show(run_folder: Path) -> None:
    with pytest.raises(Refused, match="one rank"):
        answer(Catalog.open([run_folder]), "ranksat", {"run": "first", "statistic": "rms"})


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[ViewerServer]:
    with ViewerServer(Catalog.open([run])) as started:
        yield started


def test_the_page_names_the_rank_that_went_its_own_way(browser: Any, server: ViewerServer) -> None:
    with Visit(browser, server.address) as visit:
        page = visit.go("#/ranks?kind=param&step=4")
        page.wait_for_selector("[data-testid=ranksat]")
        assert "1 site" in page.inner_text("[data-testid=verdict]")
        first = page.locator("[data-testid=ranksat] tbody tr").first
        assert "b:param.weight" in first.inner_text()
        assert "rank 2" in first.inner_text()
        assert "rank 0, 1, 2 closed" in page.inner_text("[data-testid=statuses]")
        page.fill("[aria-label=Step]", "2")
        page.press("[aria-label=Step]", "Enter")
        page.wait_for_selector("[data-testid=verdict]:has-text('agree')")
        first.locator("a").click()
        page.wait_for_selector("[data-testid=ranks]")
