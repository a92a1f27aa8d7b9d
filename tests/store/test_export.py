"""A run in other formats says the same."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.store.records import SITES, STATISTICS, image, number, record

from torchtap.errors import MissingExtraError, RunError
from torchtap.sinks.export import FORMATS, export_run
from torchtap.store.read.reader import Run, open_run
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem
from torchtap.store.write.writer import RunWriter

NARROW = torch.randn(5).to(torch.bfloat16)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    with RunWriter(tmp_path / "run", manifest={"sites": []}) as writer:
        for step in range(6):
            writer.write(record(step, tensors=step % 3 == 0, epoch=0 if step else None))
        block = ScalarBlock(("../evil/:output",), ("mean",), np.array([[np.nan]]))
        item = TensorItem("../evil/:output", "value", "full", NARROW)
        writer.write(StepRecord(6, None, None, "eval", 0.0, (block,), (item,)))
    return open_run(tmp_path / "run")


def test_parquet_is_queried_over_many_runs(run: Run, tmp_path: Path) -> None:
    import duckdb

    for name in ("a", "b"):
        export_run(run, "parquet", tmp_path / "out" / f"{name}.parquet")
    rows = duckdb.sql(
        f"select step, value from '{tmp_path}/out/*.parquet' where site = '{SITES[1]}' and statistic = 'std' "
        "and run = 'run' order by step"
    ).fetchall()
    assert rows == [(step, number(step, 1, 1)) for step in range(6) for _ in range(2)]


def test_csv_has_a_row_for_each_number(run: Run, tmp_path: Path) -> None:
    with export_run(run, "csv", tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 9 + 1
    assert rows[0] == {
        "step": "0",
        "epoch": "",
        "batch": "",
        "phase": "train",
        "site": SITES[0],
        "statistic": "mean",
        "value": "0.0",
    }
    assert float(rows[-2]["value"]) == number(5, 2, 2)
    assert rows[-1]["value"] == "nan"


def test_json_lines_have_an_object_for_each_number(run: Run, tmp_path: Path) -> None:
    lines = [
        json.loads(line) for line in export_run(run, "jsonl", tmp_path / "a.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 6 * 9 + 1
    assert lines[9]["value"] == number(1, 0, 0)
    assert (lines[0]["epoch"], lines[9]["epoch"], lines[-1]["value"]) == (None, 0, "nan")


def test_hdf5_holds_series_tensors_and_the_manifest(run: Run, tmp_path: Path) -> None:
    import h5py

    with h5py.File(export_run(run, "hdf5", tmp_path / "a.h5")) as file:
        for kind, statistic in enumerate(STATISTICS):
            found = file[f"series/{SITES[1]}/{statistic}/values"][:].tolist()
            assert found == [number(step, 1, kind) for step in range(6)]
        assert np.array_equal(file[f"tensors/{SITES[0]}/value/3"], image(3))
        assert np.array_equal(file["tensors/..%2Fevil%2F:output/value/6"], NARROW.float())
        assert file["tensors/..%2Fevil%2F:output/value/6"].attrs["dtype"] == "bfloat16"
        assert json.loads(file["manifest"][()])["format"]["name"] == "torchtap-run"
        assert file["clock/phase"][-1] == b"eval"


def test_npz_loads_without_pickle_and_stays_inside_its_folder(run: Run, tmp_path: Path) -> None:
    with np.load(export_run(run, "npz", tmp_path / "a.npz"), allow_pickle=False) as found:
        assert found[f"series|{SITES[2]}|max|values"].tolist() == [number(step, 2, 2) for step in range(6)]
        assert np.array_equal(found[f"tensors|{SITES[0]}|value|0"], image(0))
        assert found["clock|step"].tolist() == list(range(7))
        assert not any("/" in name for name in found.files)


def test_pt_loads_as_weights_only(run: Run, tmp_path: Path) -> None:
    found = torch.load(export_run(run, "pt", tmp_path / "a.pt"), weights_only=True)
    assert found["series"][SITES[0]]["mean"]["values"].tolist() == [number(step, 0, 0) for step in range(6)]
    assert torch.equal(found["tensors"][SITES[0]][3]["value"], torch.from_numpy(image(3)))
    assert torch.equal(found["tensors"]["../evil/:output"][6]["value"], NARROW)
    assert found["clock"]["phase"][-1] == "eval"


def test_an_export_replaces_an_older_one_and_leaves_nothing_else(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        for name in FORMATS:
            export_run(run, name, tmp_path / "out" / f"a.{name}")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"a.{name}" for name in FORMATS}


def test_an_export_that_fails_leaves_the_older_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export_run(run, "csv", tmp_path / "out" / "a.csv")
    before = path.read_bytes()
    monkeypatch.setattr(Run, "table", lambda self: [(0, 0, 0, "train", "site", "mean", object()), None])
    with pytest.raises(TypeError):
        export_run(run, "csv", path)
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 1


def test_an_unknown_format_says_which_there_are(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="parquet, dataset, csv, jsonl, hdf5, npz, pt"):
        export_run(run, "xlsx", tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("parquet", "pyarrow", "arrow"), ("hdf5", "h5py", "hdf5")]
)
def test_a_missing_package_names_the_extra(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingExtraError) as caught:
        export_run(run, name, tmp_path / "a")
    assert caught.value.extra == extra


@pytest.mark.parametrize("form", ["pt", "npz", "csv", "jsonl"])
def test_a_target_without_a_suffix_is_written(run: Run, tmp_path: Path, form: str) -> None:
    assert export_run(run, form, tmp_path / "out").stat().st_size > 0
    assert [path.name for path in tmp_path.glob("*out*")] == ["out"]
