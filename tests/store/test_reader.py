"""Writing a run and reading it back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.store.records import SITES, STATISTICS, image, number, record

from torchtap.errors import RunFormatError, RunNotFoundError, SelectionError
from torchtap.store.read.reader import is_run, open_run
from torchtap.store.record import ScalarBlock, StepRecord, TensorItem
from torchtap.store.write.writer import RunWriter

MANIFEST = {"sites": [{"name": name} for name in reversed(SITES)], "model": {"name": "toy"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with RunWriter(tmp_path / "run", manifest=MANIFEST) as writer:
        for step in range(20):
            writer.write(record(step, tensors=step % 5 == 0, epoch=step // 10, batch=step % 10))
            if step % 7 == 6:
                writer.flush()
        writer.event("coverage", expected=3, came=3)
        writer.event("warning", text="look out")
    return tmp_path / "run"


def test_series_come_back_as_they_were_written(folder: Path) -> None:
    run = open_run(folder)
    for site, name in enumerate(SITES):
        for kind, statistic in enumerate(STATISTICS):
            steps, values = run.series(name, statistic)
            assert steps.tolist() == list(range(20))
            assert values.tolist() == [number(step, site, kind) for step in range(20)]


READS = {
    "series": lambda run, site: run.series(site).values.tolist(),
    "statistics": lambda run, site: run.statistics(site),
    "steps": lambda run, site: run.steps(site).tolist(),
    "matrix": lambda run, site: run.matrix("value", [site]).values.tolist(),
    "table": lambda run, site: run.table([site]).value.tolist(),
    "table of a statistic": lambda run, site: run.table([site], ["value"]).value.tolist(),
}


@pytest.mark.parametrize("read", READS)
def test_every_way_of_reading_takes_a_logged_number_by_its_short_name(read: str, tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={}) as writer:
        for step in range(3):
            block = ScalarBlock((":value.loss",), ("value",), np.array([[step + 0.5]]))
            writer.write(StepRecord(step, None, None, "train", float(step), (block,), ()))
    run = open_run(tmp_path)
    assert READS[read](run, "loss") == READS[read](run, ":value.loss")
    assert len(READS[read](run, "loss")) > 0
    with pytest.raises(SelectionError, match="loss"):
        READS[read](run, "los")


def test_a_table_of_an_unknown_statistic_names_the_known_ones(folder: Path) -> None:
    with pytest.raises(SelectionError, match=STATISTICS[0]):
        open_run(folder).table(statistics=["stdd"])


def test_the_clock_has_a_row_for_each_record(folder: Path) -> None:
    clock = open_run(folder).clock()
    assert clock.step.tolist() == list(range(20))
    assert clock["epoch"].tolist() == [0] * 10 + [1] * 10
    assert set(clock.phase) == {"train"}
    assert clock.time[3] == 1003.0


def test_an_epoch_that_was_never_set_is_minus_one(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={}) as writer:
        writer.write(record(0))
    assert open_run(tmp_path).clock().epoch.tolist() == [-1]
    assert open_run(tmp_path).table().to_pandas()["epoch"].isna().all()


def test_sites_are_in_the_order_of_the_manifest(folder: Path) -> None:
    assert open_run(folder).sites() == list(reversed(SITES))


def test_tensors_are_listed_and_read_one_by_one(folder: Path) -> None:
    run = open_run(folder)
    assert [ref.step for ref in run.tensors(SITES[0])] == [0, 5, 10, 15]
    assert run.tensors()[0][:6] == (SITES[0], "value", "full", 0, (64, 4), "float32")
    assert torch.equal(run.tensor(SITES[0], step=10), torch.from_numpy(image(10)))
    assert np.array_equal(run.array(SITES[0]), image(15))


def test_a_matrix_has_nan_where_a_site_was_absent(tmp_path: Path) -> None:
    sites = ("a:output", "b:output")
    with RunWriter(tmp_path, manifest={}) as writer:
        for step in range(4):
            here = np.array([True, step % 2 == 0])
            block = ScalarBlock(sites, ("mean",), np.array([[1.0 + step], [10.0 + step]]), here)
            writer.write(StepRecord(step, None, None, "train", 0.0, (block,), ()))
    run = open_run(tmp_path)
    found = run.matrix("mean")
    assert found.sites == list(sites)
    assert found.steps.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(found.values, [[1, 2, 3, 4], [10, np.nan, 12, np.nan]])
    assert run.series("b:output", "mean").steps.tolist() == [0, 2]
    assert run.matrix("mean", ["b:output"], steps=[2, 3]).values.tolist()[0][0] == 12.0
    assert len(run.table()) == 6


def test_the_table_has_every_number_once(folder: Path) -> None:
    table = open_run(folder).table()
    assert len(table) == 20 * 9
    rows = list(table)
    first = open_run(folder).sites()[0]
    assert rows[0] == (0, 0, 0, "train", first, "mean", number(0, SITES.index(first), 0))
    assert len({(row[0], row[4], row[5]) for row in rows}) == len(rows)
    assert all(row[6] == number(row[0], SITES.index(row[4]), STATISTICS.index(row[5])) for row in rows)


def test_the_table_converts_to_arrow_pandas_and_polars(folder: Path) -> None:
    table = open_run(folder).table(sites=[SITES[1]], statistics=["std"])
    arrow, pandas, polars = table.to_arrow(), table.to_pandas(), table.to_polars()
    assert arrow.num_rows == len(pandas) == len(polars) == 20
    assert pandas["value"].tolist() == polars["value"].to_list() == arrow["value"].to_pylist()
    assert set(pandas["site"]) == {SITES[1]}
    assert pandas["epoch"].tolist() == [0] * 10 + [1] * 10


def test_an_unknown_site_names_the_nearest(folder: Path) -> None:
    with pytest.raises(SelectionError, match="encoder:output") as caught:
        open_run(folder).series("encoder:outptu", "mean")
    assert "encoder:output" in caught.value.nearest


def test_an_unknown_statistic_says_which_there_are(folder: Path) -> None:
    with pytest.raises(SelectionError, match="mean, std, max"):
        open_run(folder).series(SITES[0], "median")
    with pytest.raises(SelectionError, match="mean, std, max"):
        open_run(folder).matrix("median")


def test_a_tensor_of_a_step_without_one_names_the_nearest_steps(folder: Path) -> None:
    with pytest.raises(SelectionError, match="nearest steps are 5"):
        open_run(folder).tensor(SITES[0], step=6)
    with pytest.raises(SelectionError, match="numbers only"):
        open_run(folder).tensor(SITES[1])


def test_events_and_coverage_come_back(folder: Path) -> None:
    run = open_run(folder)
    assert run.coverage() == {"expected": 3, "came": 3}
    assert [event["text"] for event in run.events("warning")] == ["look out"]
    assert run.problems == []
    assert run.closed
    assert run.model_tree == {"name": "toy"}


def test_a_histogram_comes_back_with_its_edges(tmp_path: Path) -> None:
    items = (
        TensorItem("a:output", "counts", "histogram", torch.tensor([1, 2, 3])),
        TensorItem("a:output", "edges", "histogram", torch.tensor([0.0, 1.0, 2.0, 3.0])),
    )
    with RunWriter(tmp_path, manifest={}) as writer:
        writer.write(StepRecord(7, None, None, "train", 0.0, (), items))
    counts, edges = open_run(tmp_path).histogram("a:output")
    assert counts.tolist() == [1, 2, 3]
    assert edges.tolist() == [0, 1, 2, 3]


def test_phases_of_one_step_are_series_of_their_own(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={}) as writer:
        writer.write(record(3, phase="train"))
        writer.write(record(3, phase="eval"))
    run = open_run(tmp_path)
    for phase in ("train", "eval", None):
        assert run.series(SITES[0], "mean", phase).steps.tolist() == [3]
        assert run.matrix("mean", phase=phase).steps.tolist() == [3]
    assert run.of_phase("eval").clock().phase.tolist() == ["eval"]
    with pytest.raises(SelectionError, match="no phase 'valid'; it has train, eval"):
        run.series(SITES[0], "mean", "valid")
    assert run.steps().tolist() == [3]
    table = run.table()
    assert sorted(set(table["phase"].tolist())) == ["eval", "train"]
    assert run.clock().phase.tolist() == ["train", "eval"]


def test_each_rank_has_its_own_part(tmp_path: Path) -> None:
    for rank in (0, 1):
        with RunWriter(tmp_path, manifest={}, rank=rank, world=2) as writer:
            writer.write(record(rank))
    run = open_run(tmp_path)
    assert run.ranks == [0, 1]
    assert run.steps().tolist() == [0, 1]
    assert run.rank(0).steps().tolist() == [0]
    assert run.rank(1).steps().tolist() == [1]
    with pytest.raises(SelectionError, match="no rank 7"):
        run.rank(7)


def test_a_folder_without_a_run_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        open_run(tmp_path / "nowhere")
    (tmp_path / "notes").touch()
    with pytest.raises(RunFormatError, match=r"is not a run: it has no folder 'rank-00000'$"):
        open_run(tmp_path)
    assert not is_run(tmp_path)
    with RunWriter(tmp_path / "runs" / "first", manifest={}) as writer:
        writer.write(record(0))
    with pytest.raises(RunFormatError, match="'first' in it is one"):
        open_run(tmp_path / "runs")


def test_a_run_shows_itself_and_escapes_what_it_shows(folder: Path, tmp_path: Path) -> None:
    run = open_run(folder)
    assert "steps 20 (0 to 19)" in repr(run)
    strange = tmp_path / "<script>"
    folder.rename(strange)
    assert "<script>" not in open_run(strange)._repr_html_()


def test_reading_imports_no_torch(folder: Path) -> None:
    code = f"""
import sys
from torchtap.store.read.reader import open_run
run = open_run({str(folder)!r})
run.series({SITES[0]!r}, "mean"); run.array({SITES[0]!r}); run.table(); run.matrix("mean"); repr(run)
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_the_training_shows_of_a_site_completes_the_manifest(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={"sites": [{"name": SITES[0], "class": "Linear"}]}) as writer:
        writer.write(record(0))
        writer.event("sites", sites=[{"name": SITES[0], "shape": [2, 3]}, {"name": SITES[1], "shape": None}])
    facts = open_run(tmp_path).site_facts()
    assert facts[SITES[0]] == {"name": SITES[0], "class": "Linear", "shape": [2, 3]}
    assert list(facts) == [SITES[0], SITES[1]]


def test_a_loss_that_the_session_noted_is_a_problem_of_a_closed_run_too(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={}) as writer:
        writer.event("lost", message="metric 'entropy' raised")
    assert any("metric 'entropy' raised" in problem for problem in open_run(tmp_path).problems)


def test_the_steps_of_a_site_are_those_of_all_its_numbers_and_tensors(tmp_path: Path) -> None:
    with RunWriter(tmp_path, manifest={}) as writer:
        for step, statistic in enumerate(("mean", "std", "max")):
            block = ScalarBlock(
                ("a:output", "b:output"), (statistic,), np.ones((2, 1)), np.array([True, step == 1])
            )
            writer.write(StepRecord(step, None, None, "train", 0.0, (block,), ()))
        item = TensorItem("b:output", "value", "full", torch.ones(1))
        writer.write(StepRecord(9, None, None, "train", 0.0, (), (item,)))
    run = open_run(tmp_path)
    assert run.steps("a:output").tolist() == [0, 1, 2]
    assert run.steps("b:output").tolist() == [1, 9]


def test_a_replaced_manifest_is_seen_and_an_unchanged_one_is_not_parsed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunWriter(tmp_path, manifest={"plan": 1}) as writer:
        run = open_run(tmp_path)
        writer.update_manifest(plan=2)
        writer.flush()
        run.refresh()
        assert run.manifest["plan"] == 2
        monkeypatch.setattr("torchtap.store.read.attempt.load_json", lambda text: pytest.fail("parsed again"))
        run.refresh()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01812, "0.0181"),
        (267.0, "267"),
        (-2.4e-05, "-2.4e-5"),
        (-3.88e-105, "-3.9e-105"),
        (1e12, "1e+12"),
        (0.0, "0"),
    ],
)
def test_a_number_in_a_column_is_short(value: float, text: str) -> None:
    from torchtap.store.read.lookup import compact

    assert compact(value) == text
