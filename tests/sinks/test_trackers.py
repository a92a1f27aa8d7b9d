"""MLflow and Trackio, offline, each read back by its own reader; what every tracker is told of phases and alerts."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from torchtap.errors import MissingExtraError, PlanError
from torchtap.sinks import JsonLinesSink, MlflowSink, TrackioSink, make_sink, sink_names
from torchtap.sinks.selection import Choice, label
from torchtap.sinks.trackers import mlflow_name
from torchtap.store.record import Consumer, ScalarBlock, StepRecord
from torchtap.testing import SinkContract

Kept = set[tuple[int, str]]
LABELS = {label(site, "mean"): site for site in (*SinkContract.sites, "a:output", "b:output")} | {
    "value/loss": ":value.loss"
}


def step_of(phase: str, step: int = 0) -> StepRecord:
    block = ScalarBlock(("a:output",), ("mean",), np.array([[1.0 + step]]))
    return StepRecord(step, None, None, phase, 1000.0, (block,), ())


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Making MLflow's tables takes seconds, so all tests share one file."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


class TestMlflowSink(SinkContract):
    @pytest.fixture(autouse=True)
    def _place(self, database: str) -> None:
        self.uri = database

    def sink(self, folder: Path) -> Consumer:
        return MlflowSink("a training", tracking_uri=self.uri)

    def history(self, sink: MlflowSink, name: str) -> dict[int, float]:
        from mlflow import MlflowClient

        found = MlflowClient(self.uri).get_metric_history(sink.run_id, name)
        return {each.step: each.value for each in found}

    def kept(self, folder: Path, sink: Consumer) -> Kept:
        return {
            (step, site)
            for name, site in LABELS.items()
            for step in self.history(cast(MlflowSink, sink), mlflow_name(name))
        }

    def test_numbers_come_back_as_they_were_nan_included(self, tmp_path: Path) -> None:
        sink = cast(MlflowSink, self.sink(tmp_path))
        self.fill(sink)
        sink.close()
        assert self.history(sink, "output.mean/blocks.0") == {0: 0.0, 1: 1.0, 2: 2.0}
        assert math.isnan(self.history(sink, "param.std/blocks.0.norm.weight")[0])
        assert self.history(sink, "value/loss")[0] == 0.5

    def test_a_step_with_more_numbers_than_a_batch_takes_arrives_whole(self, tmp_path: Path) -> None:
        sink = cast(MlflowSink, self.sink(tmp_path))
        sites = tuple(f"layer{number}:output" for number in range(1203))
        block = ScalarBlock(sites, ("mean",), np.arange(1203.0)[:, None])
        sink.write(StepRecord(7, None, None, "train", 1.0, (block,), ()))
        sink.close()
        assert self.history(sink, "output.mean/layer1202") == {7: 1202.0}

    def test_it_ends_its_own_run_and_leaves_a_given_one_open(self, tmp_path: Path) -> None:
        from mlflow import MlflowClient

        client = MlflowClient(self.uri)
        own = cast(MlflowSink, self.sink(tmp_path))
        given = MlflowSink(run_id=client.create_run("0").info.run_id, tracking_uri=self.uri)
        own.close()
        given.close()
        assert client.get_run(own.run_id).info.status == "FINISHED"
        assert client.get_run(given.run_id).info.status == "RUNNING"

    def test_an_alert_is_a_tag_of_the_run(self, tmp_path: Path) -> None:
        from mlflow import MlflowClient

        sink = cast(MlflowSink, self.sink(tmp_path))
        sink.alert("error", "NaN", "born in blocks.0", 3, "blocks.0:output")
        sink.close()
        tags = MlflowClient(self.uri).get_run(sink.run_id).data.tags
        assert tags["torchtap.alert.0"] == "error: NaN (step 3): born in blocks.0"


def test_a_name_keeps_to_mlflows_alphabet() -> None:
    assert mlflow_name("output.mean/a.b#2") == "output.mean/a.b.call2"
    assert mlflow_name("output.mean/[0]?") == "output.mean/_0__"


class TestTrackioSink(SinkContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import trackio.sqlite_storage as storage

        monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
        self.storage: Any = storage.SQLiteStorage

    def sink(self, folder: Path) -> Consumer:
        return TrackioSink("a-training", name="one")

    def logs(self) -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", self.storage.get_logs("a-training", "one"))

    def kept(self, folder: Path, sink: Consumer) -> Kept:
        return {(line["step"], LABELS[name]) for line in self.logs() for name in line if name in LABELS}

    def test_numbers_come_back_as_they_were(self, tmp_path: Path) -> None:
        sink = self.sink(tmp_path)
        self.fill(sink)
        sink.close()
        found = {line["step"]: line["output.mean/blocks.0"] for line in self.logs()}
        assert found == {0: 0.0, 1: 1.0, 2: 2.0}

    def test_an_alert_is_an_alert(self, tmp_path: Path) -> None:
        sink = cast(TrackioSink, self.sink(tmp_path))
        sink.alert("error", "NaN", "born in blocks.0", 3, "blocks.0:output")
        sink.close()
        (alert,) = self.storage.get_alerts("a-training")
        assert (alert["title"], alert["level"], alert["step"]) == ("NaN", "error", 3)


@pytest.mark.parametrize(
    ("package", "make"), [("mlflow", lambda: MlflowSink("x")), ("trackio", lambda: TrackioSink("x"))]
)
def test_without_its_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str, make: Callable[[], Consumer]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"torchtap\[{package}\]"):
        make()


def test_every_sink_is_listed_where_one_is_not_known() -> None:
    with pytest.raises(PlanError) as caught:
        make_sink("tensorbord:logs")
    assert "did you mean 'tensorboard'?" in str(caught.value)
    assert all(name in str(caught.value) for name in sink_names())
    assert {"jsonl", "memory", "mlflow", "tensorboard", "trackio", "wandb"} <= set(sink_names())


def test_numbers_of_an_evaluation_have_names_of_their_own() -> None:
    choice = Choice()
    names = [
        name for phase in ("train", "eval") for found, _ in choice.numbers(step_of(phase)) for name in found
    ]
    assert names == ["output.mean/a", "eval.output.mean/a"]


def test_a_sink_tells_what_it_was_asked_for_and_never_got(tmp_path: Path) -> None:
    choice = Choice("b:output", ["mean", "median"])
    list(choice.numbers(step_of("train")))
    with pytest.warns(RuntimeWarning, match=r"site 'b:output', statistic 'median'"):
        choice.tell_what_never_came("ASink")


@pytest.mark.parametrize("came", [True, False])
def test_a_sink_that_got_all_or_saw_no_step_is_quiet(came: bool) -> None:
    choice = Choice("a:output" if came else "b:output", ["mean"])
    if came:
        list(choice.numbers(step_of("train")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice.tell_what_never_came("ASink")


def test_an_alert_is_a_line_of_json(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "steps.jsonl")
    sink.alert("warning", "dead", "half of the units", 4, "0:output")
    sink.close()
    line = json.loads((tmp_path / "steps.jsonl").read_text())
    assert line == {
        "alert": "warning", "title": "dead", "text": "half of the units", "step": 4, "site": "0:output",
    }  # fmt: skip
