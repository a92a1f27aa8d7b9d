"""A folder of runs on an object store: its runs are found, shown and never changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.optional import need
from tests.viewer.recordings import small_run

import torchtap as tt
from torchtap.errors import RunNotFoundError
from torchtap.viewer.manage import manage
from torchtap.viewer.open_run import Refused
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import answer


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    fsspec = need("fsspec")
    for name in ("sweep/one", "sweep/two", "alone"):
        small_run(tmp_path / "runs" / name, labels={"lr": 0.1})
    store = fsspec.filesystem("memory")
    store.put(f"{tmp_path}/runs", "/bucket/runs", recursive=True)
    shutil.rmtree(tmp_path / "runs")
    yield "memory://bucket/runs"
    store.rm("/bucket", recursive=True)


def test_the_runs_of_a_folder_are_found_and_shown(address: str) -> None:
    catalog = Catalog.open([address])
    while catalog.survey():
        pass
    listed = json.loads(answer(catalog, "runs", {}))
    assert listed["names"] == ["alone", "sweep/one", "sweep/two"]
    assert listed["folder"]
    assert not listed["managed"]
    card = next(run for run in listed["runs"] if run["name"] == "sweep/two")
    expected = tt.open(f"{address}/sweep/two").series("loss").values[-1]
    assert card["values"]["loss"][0] == pytest.approx(expected)
    about = json.loads(answer(catalog, "about", {"run": "sweep/one"}))
    assert [site["name"] for site in about["sites"]] == ["a:output", "b:output", ":value.loss"]


def test_a_run_alone_and_an_empty_place(address: str) -> None:
    assert Catalog.open([f"{address}/alone"]).names() == ["alone"]
    with pytest.raises(RunNotFoundError, match="no run and no folder of runs"):
        Catalog.open(["memory://nothing/here"])


def test_a_run_on_a_store_is_never_changed(address: str) -> None:
    with pytest.raises(Refused):
        manage(Catalog.open([address]), {"run": "alone", "action": "delete", "value": "alone"})
    assert tt.open(f"{address}/alone").closed
