"""The built-in sinks, each held to the contract and to what it alone does."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from torchtap.errors import MissingExtraError, PlanError, SelectionError
from torchtap.sinks import (
    CallbackSink,
    JsonLinesSink,
    MemorySink,
    TensorBoardSink,
    WandbSink,
    make_sink,
    sink_names,
)
from torchtap.sinks.selection import Choice, label
from torchtap.sinks.trackers import attention_picture
from torchtap.store.read.reader import open_run
from torchtap.store.record import Consumer, ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter
from torchtap.testing import SinkContract

Kept = set[tuple[int, str]]


def numbers_in(records: Any) -> Kept:
    return {
        (record.step, site)
        for record in records
        for block in record.scalars
        for row, site in enumerate(block.sites)
        if block.present is None or block.present[row]
    }


class TestMemorySink(SinkContract):
    def sink(self, folder: Path) -> Consumer:
        return MemorySink()

    def kept(self, folder: Path, sink: Consumer) -> Kept:
        return numbers_in(cast(MemorySink, sink).records)


class TestCallbackSink(SinkContract):
    def sink(self, folder: Path) -> Consumer:
        self.seen: list[StepRecord] = []
        return CallbackSink(self.seen.append)

    def kept(self, folder: Path, sink: Consumer) -> Kept:
        return numbers_in(self.seen)


class TestJsonLinesSink(SinkContract):
    def sink(self, folder: Path) -> Consumer:
        return JsonLinesSink(folder / "deep" / "steps.jsonl")

    def kept(self, folder: Path, sink: Consumer) -> Kept:
        lines = map(json.loads, (folder / "deep" / "steps.jsonl").read_text().splitlines())
        return {(line["step"], site) for line in lines for site in line["values"]}


class TestRunWriterAsASink(SinkContract):
    def sink(self, folder: Path) -> Consumer:
        return RunWriter(folder, manifest={})

    def kept(self, folder: Path, sink: Consumer) -> Kept:
        return {(row[0], row[4]) for row in open_run(folder).table()}


def tensorboard_events(folder: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [
        event for path in sorted(folder.glob("events*")) for event in LegacyEventFileLoader(str(path)).Load()
    ]


class TestTensorBoardSink(SinkContract):
    def sink(self, folder: Path) -> Consumer:
        return TensorBoardSink(folder)

    def kept(self, folder: Path, sink: Consumer) -> Kept:
        names = {label(site, "mean"): site for site in (*self.sites, "a:output", "b:output")}
        names["value/loss"] = ":value.loss"
        return {
            (event.step, names[value.tag])
            for event in tensorboard_events(folder)
            for value in event.summary.value
            if value.tag in names
        }

    def test_numbers_are_grouped_by_kind_and_statistic_at_the_right_step(self, tmp_path: Path) -> None:
        sink = self.sink(tmp_path)
        self.fill(sink)
        sink.close()
        found = {
            (event.step, value.tag): value.simple_value
            for event in tensorboard_events(tmp_path)
            for value in event.summary.value
            if value.HasField("simple_value")
        }
        assert found[1, "output.mean/blocks.0"] == 1.0
        assert found[0, "param.mean/blocks.0.norm.weight"] == 2.0
        assert found[0, "value/loss"] == 0.5
        assert np.isnan(found[0, "param.std/blocks.0.norm.weight"])

    def test_histograms_and_attention_maps_are_shown(self, tmp_path: Path) -> None:
        sink = self.sink(tmp_path)
        self.fill(sink)
        sink.close()
        values = [value for event in tensorboard_events(tmp_path) for value in event.summary.value]
        histogram = next(value.histo for value in values if value.tag == "output.histogram/blocks.0")
        assert histogram.num == 4
        assert (histogram.min, histogram.max) == (0.0, 1.0)
        assert list(histogram.bucket_limit) == [0.0, 0.5, 1.0]
        assert list(histogram.bucket) == [0.0, 3.0, 1.0]
        picture = next(value.image for value in values if value.tag == "attention.map/blocks.0.attn")
        assert (picture.height, picture.width) == (17, 17)

    def test_a_graph_is_shown(self, tmp_path: Path) -> None:
        sink = TensorBoardSink(tmp_path)
        sink.add_graph(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()), torch.ones(1, 2))
        sink.flush()
        sink.close()
        assert any(event.graph_def for event in tensorboard_events(tmp_path))

    def test_without_its_package_the_extra_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
        with pytest.raises(MissingExtraError, match=r"torchtap\[tensorboard\]"):
            TensorBoardSink(tmp_path)


class StandIn:
    """What the sink needs of a wandb run."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.metrics: dict[str, str | None] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics[name] = step_metric

    def log(self, numbers: dict[str, Any]) -> None:
        self.logged.append(numbers)

    def finish(self) -> None:
        self.finished = True


class TestWandbSink(SinkContract):
    def sink(self, folder: Path) -> Consumer:
        self.run = StandIn()
        return WandbSink(run=self.run)

    def kept(self, folder: Path, sink: Consumer) -> Kept:
        names = {label(site, "mean"): site for site in (*self.sites, "a:output", "b:output")}
        names["value/loss"] = ":value.loss"
        return {
            (line["torchtap/step"], names[name]) for line in self.run.logged for name in line if name in names
        }

    def test_there_is_one_call_a_step_on_our_own_axis(self, tmp_path: Path) -> None:
        sink = self.sink(tmp_path)
        self.fill(sink)
        sink.close()
        assert [line["torchtap/step"] for line in self.run.logged] == [0, 1, 2]
        assert self.run.metrics["output.mean/*"] == "torchtap/step"
        assert not self.run.finished, "a run that was handed in belongs to its owner"

    def test_histograms_are_handed_over_as_such(self, tmp_path: Path) -> None:
        sink = self.sink(tmp_path)
        sink.write(self.record(0))
        assert self.run.logged[0]["output.histogram/blocks.0"].histogram == [0, 3, 1, 0]

    def test_only_what_was_chosen_is_sent(self) -> None:
        run = StandIn()
        sink = WandbSink(run=run, sites="blocks.*:output", statistics=["std"], histograms=False)
        sink.write(self.record(0))
        assert set(run.logged[0]) == {"torchtap/step", "output.std/blocks.0"}


def test_wandb_works_offline_without_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    sink = WandbSink("toy", folder=tmp_path, statistics=["mean"])
    sink.write(SinkContract().record(3))
    sink.close()
    import wandb

    wandb.teardown()  # W&B's own process writes the file, and goes on for a moment after the run has ended
    files = list(tmp_path.rglob("*.wandb"))
    assert len(files) == 1
    until = time.monotonic() + 60
    while b"output.mean/blocks.0" not in files[0].read_bytes() and time.monotonic() < until:
        time.sleep(0.2)
    assert b"output.mean/blocks.0" in files[0].read_bytes()


def test_memory_keeps_the_last_records_only() -> None:
    sink = MemorySink(last=2)
    for step in range(5):
        sink.write(SinkContract().record(step))
    assert [record.step for record in sink.records] == [3, 4]
    assert sink.series("blocks.0:output", "mean").steps.tolist() == [3, 4]
    assert sink.tensor("blocks.0:output.1#2").dtype == torch.bfloat16
    with pytest.raises(SelectionError, match="at step 1"):
        sink.tensor("blocks.0:output.1#2", step=1)
    with pytest.raises(SelectionError, match="median"):
        sink.series("blocks.0:output", "median")


def test_json_lines_hold_valid_json_whatever_the_numbers(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "a.jsonl", statistics=["value", "std"])
    sink.write(SinkContract().record(1))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    (text,) = (tmp_path / "a.jsonl").read_text().splitlines()
    line = json.loads(text, parse_constant=refuse)
    sink.close()
    assert line["values"][":value.loss"] == {"value": "inf"}
    assert line["values"]["blocks.0.norm:param.weight"] == {"std": "nan"}
    assert {
        "site": "blocks.0:output.2",
        "field": "value",
        "reduction": "full",
        "shape": [0],
        "dtype": "float32",
    } in line["tensors"]


def test_json_lines_continue_an_older_file(tmp_path: Path) -> None:
    for step in range(2):
        sink = JsonLinesSink(tmp_path / "a.jsonl")
        sink.write(SinkContract().record(step))
        sink.close()
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2


def test_an_alias_can_be_chosen_by_its_name() -> None:
    block = ScalarBlock(("my loss", "a:output"), ("mean",), np.array([[1.0], [2.0]]))
    record = StepRecord(0, None, None, "train", 0.0, (block,), ())
    ((names, values),) = Choice("my loss").numbers(record)
    assert names == ["my loss.mean/model"]
    assert values.tolist() == [1.0]


def test_sinks_are_made_from_text(tmp_path: Path) -> None:
    assert {"jsonl", "memory", "tensorboard", "wandb"} <= set(sink_names())
    sink = make_sink(f"jsonl:{tmp_path / 'a.jsonl'}")
    assert isinstance(sink, JsonLinesSink)
    sink.close()
    assert cast(MemorySink, make_sink("memory:7")).records.maxlen == 7
    assert isinstance(make_sink("memory"), MemorySink)
    with pytest.raises(PlanError, match="tensorboard"):
        make_sink("tensorbord:x")
    with pytest.raises(PlanError, match="needs a place"):
        make_sink("jsonl")
    with pytest.raises(PlanError, match=r"'memory:many'.*how many records"):
        make_sink("memory:many")


def test_attention_pictures_tile_the_heads_and_thin_long_sequences() -> None:
    maps = torch.zeros(1, 3, 4, 4)
    maps[0, 1, 2, 3] = 0.5
    picture = attention_picture(maps)
    assert picture is not None
    assert picture.shape == (9, 9)
    assert picture[2, 5 + 3] == 255, "each head reaches white"
    long = attention_picture(torch.rand(1, 1000, 1000))
    assert long is not None
    assert long.shape == (250, 250)
    assert attention_picture(torch.ones(3)) is None
    assert attention_picture(torch.empty(1, 0, 0)) is None
