"""A training in TensorBoard: its own reader finds what was written, and its own page shows it in a browser."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import GPT
from tests.optional import need
from torch.nn import functional

import torchtap as tt

STEPS = [0, 2, 4, 6, 8]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Event files of ten steps of training, every second one recorded, with a graph; beside a run."""
    need("tensorboard")
    folder = tmp_path_factory.mktemp("tensorboard")
    torch.manual_seed(0)
    model = GPT()
    tokens = torch.randint(0, 11, (4, 8))
    sink = tt.TensorBoardSink(folder / "logs")
    sink.add_graph(model, tokens)
    taps = [
        tt.tap("blocks.*:output", every=2),
        tt.tap("*:param_grad", tt.Histogram(), every=2),
        tt.tap("blocks.*:attention", tt.Full(), steps=[0, 8]),
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with tt.watch(model, folder / "run", taps, sinks=[sink]) as watch:
        for _ in range(10):
            with watch.step():
                logits = model(tokens)
                loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
                watch.log(loss=loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return folder


@pytest.fixture(scope="module")
def events(logs: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(logs / "logs"), {"histograms": 0, "images": 0, "tensors": 0}).Reload()


def test_numbers_read_back_equal_those_of_the_run_at_the_same_steps(logs: Path, events: Any) -> None:
    run = tt.open(logs / "run")
    for statistic in ("mean", "std", "absmax"):
        scalars = events.Scalars(f"output.{statistic}/blocks.1")
        assert [each.step for each in scalars] == STEPS
        expected = run.series("blocks.1:output", statistic).values
        assert np.allclose([each.value for each in scalars], expected, rtol=1e-6)
    losses = events.Scalars("value/loss")
    assert [each.step for each in losses] == list(range(10))


def test_tags_group_by_kind_and_statistic(events: Any) -> None:
    groups = {tag.partition("/")[0] for tag in events.Tags()["scalars"]}
    assert {"output.mean", "output.std", "value"} <= groups
    modules = {tag.partition("/")[2] for tag in events.Tags()["scalars"] if tag.startswith("output.mean/")}
    assert modules == {"blocks.0", "blocks.1"}


def test_histograms_hold_every_element(events: Any) -> None:
    tag = "param_grad.histogram/blocks.0.mlp.0.weight"
    assert tag in events.Tags()["histograms"]
    found = events.Histograms(tag)
    assert [each.step for each in found] == STEPS
    for each in found:
        assert each.histogram_value.num == 16 * 64
        assert sum(each.histogram_value.bucket) == 16 * 64


def test_attention_maps_are_pictures_and_the_graph_is_there(events: Any) -> None:
    images = [tag for tag in events.Tags()["images"] if tag.startswith("attention.map/")]
    assert any("blocks.0" in tag for tag in images)
    assert {each.step for tag in images for each in events.Images(tag)} == {0, 8}
    assert all(events.Images(tag)[0].encoded_image_string.startswith(b"\x89PNG") for tag in images)
    graph = str(events.Graph())
    assert "blocks" in graph
    assert "GPT" in graph


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """TensorBoard itself, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={folder}", f"--port={port}"]
    process = subprocess.Popen(
        [*command, "--host=127.0.0.1", "--load_fast=false", "--reload_interval=1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                tags = urllib.request.urlopen(f"{address}/data/plugin/scalars/tags", timeout=5).read()
                if b"output.mean" in tags:
                    break
            except OSError:
                assert process.poll() is None, "TensorBoard did not start"
            time.sleep(0.25)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def test_the_page_shows_the_scalars(logs: Path, tmp_path: Path, browser: Any) -> None:
    with server(logs / "logs") as address:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(
            f"{address}/?forceSVG=true#timeseries"
        )  # a headless browser has no WebGL to draw lines with
        page.get_by_text("output.mean", exact=True).first.wait_for(timeout=90_000)
        for group in ("output.std", "value"):
            assert page.get_by_text(re.compile(f"^{re.escape(group)}$")).count()
        page.locator("image-card img, image-card canvas").first.wait_for()
        take_picture(page, "tensorboard-maps", tmp_path)
        page.get_by_role("combobox", name="Filter tags (regex)").fill("value/loss|output.std")
        page.keyboard.press("Escape")
        page.wait_for_function("document.querySelectorAll('line-chart path[d]').length >= 3")
        page.wait_for_timeout(500)  # lines are drawn a moment after their elements are there
        take_picture(page, "tensorboard-lines", tmp_path)


def take_picture(page: Any, name: str, folder: Path) -> None:
    """A screenshot, kept where TORCHTAP_PICTURES says."""
    picture = Path(os.environ.get("TORCHTAP_PICTURES", folder)) / f"{name}.png"
    page.screenshot(path=picture)
    pixels = picture.read_bytes()
    assert pixels.startswith(b"\x89PNG")
    assert len(pixels) > 20_000  # an empty page is smaller
