"""What people come to the page for, each in a browser with the number of things that a hand does for it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.viewer.browsing import Hand, Visit
from tests.viewer.recordings import small_run, train

import torchtap as tt
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import ViewerServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training whose gradients vanish, and three that differ in their rate."""
    root = tmp_path_factory.mktemp("tasks") / "runs"
    root.mkdir()
    gradients = [tt.tap("*:output", keep=tt.Stats()), tt.tap("*:grad_output", keep=tt.Stats())]
    train(root / "vanishing", steps=12, layers=6, plain=6, taps=gradients)
    for rate in (1e-3, 3e-3, 1e-2):
        train(
            root / f"rate-{rate:g}",
            steps=24,
            rate=rate,
            taps=[*gradients, tt.tap("head:param.*", keep=tt.Full())],
        )
    return root


@pytest.fixture(scope="module")
def server(folder: Path, run_folder: Path) -> Iterator[ViewerServer]:
    with ViewerServer(Catalog.open([folder, run_folder])) as started:
        yield started


@pytest.fixture
def hand(browser: Any, server: ViewerServer) -> Iterator[Hand]:
    with Visit(browser, server.address) as visit:
        visit.go("")
        visit.page.wait_for_selector(".runtable a:text-is('first')")
        yield Hand(visit)


def test_where_the_nan_began_takes_two_clicks(hand: Hand) -> None:
    hand.page.wait_for_selector(".runtable .badge.nan")
    hand.click(".runtable tr:has-text('first') .badge.nan")
    finding = hand.page.locator("article.finding").first
    assert "step 24" in finding.inner_text()
    hand.click("article.finding .links a:has-text('open blocks.1.mlp.down:output')")
    hand.page.wait_for_selector("section.site h1:has-text('blocks.1.mlp.down:output')")
    assert hand.count == 2


def test_which_layer_s_gradients_vanish_takes_three(hand: Hand) -> None:
    hand.click(".runtable a:text-is('vanishing')")
    hand.visit.drawn("rms")
    hand.choose("Kind", "grad_output")
    hand.page.wait_for_selector(".badge")
    hand.click("nav.views a:has-text('Findings')")
    finding = hand.page.locator("article.finding", has_text="Vanishing gradient").first
    finding.wait_for()
    assert "grad_output" in finding.inner_text()
    assert hand.count == 3


def test_whether_the_loss_spiked_with_a_layer_is_one_picture(hand: Hand, run_folder: Path) -> None:
    hand.click(".runtable a:text-is('first')")
    hand.visit.drawn("rms")
    hand.page.wait_for_selector(".heatmap[data-loss=loss]")
    loss = tt.open(run_folder).series(":value.loss", "value")
    tip = hand.visit.point(0.5, 10.5 / 30).inner_text()  # the cross-hair goes through both
    step = int(tip.split("step ")[1].split("\n")[0])
    said = float(tip.split("loss ")[1].split("\n")[0])
    assert math.isclose(said, loss.values[list(loss.steps).index(step)], rel_tol=1e-3)
    assert hand.count == 1


def test_the_losses_of_three_runs_over_each_other_take_four(hand: Hand) -> None:
    for rate in ("0.001", "0.003", "0.01"):
        hand.click(f"input[aria-label='Pick rate-{rate}']")
    hand.click("a.button:has-text('Overlay 3')")
    hand.page.wait_for_selector("[data-testid=scalar][data-lines='3'] .uplot canvas")
    legend = hand.page.locator(".u-legend").inner_text()
    assert all(f"rate-{rate}" in legend for rate in ("0.001", "0.003", "0.01"))
    assert hand.count == 4


def test_the_site_that_changed_most_between_two_steps_takes_four(hand: Hand, folder: Path) -> None:
    hand.click(".runtable a:text-is('rate-0.01')")
    hand.click("nav.views a:text('Changes')")
    hand.type("input[aria-label='First step']", "3")
    hand.type("input[aria-label='Second step']", "20")
    hand.page.wait_for_function("() => location.hash.includes('after=20')")
    hand.page.wait_for_selector("th:has-text('step 3')")
    hand.page.wait_for_timeout(200)
    run = tt.open(folder / "rate-0.01")
    sites = [site for site in run.sites() if site.endswith(":output")]
    change = {}
    for site in sites:
        values = run.series(site, "rms").values
        change[site] = abs(values[20] - values[3]) / abs(values[3])
    first = hand.page.locator("[data-testid=changes] tbody tr").first
    expected = max(change, key=lambda site: change[site])
    assert change[_site_of(first.locator("a").inner_text())] == pytest.approx(change[expected], rel=1e-5)
    shown = float(first.locator("td").nth(4).inner_text().strip("+ %").replace("−", "-"))
    assert shown == pytest.approx(100 * change[expected], rel=0.01)
    assert hand.count == 4


def test_a_step_that_is_being_written_stays_when_the_page_is_drawn_anew(hand: Hand) -> None:
    hand.click(".runtable a:text-is('rate-0.01')")
    hand.click("nav.views a:text('Changes')")
    field = "input[aria-label='First step']"
    hand.page.fill(field, "3")
    for _ in range(3):  # as an answer that arrives, or a training that goes on, has it drawn
        hand.page.evaluate("() => window.dispatchEvent(new HashChangeEvent('hashchange'))")
        hand.page.wait_for_timeout(50)
    assert hand.page.input_value(field) == "3"
    hand.page.keyboard.press("Tab")
    hand.page.wait_for_function("() => location.hash.includes('before=3')")
    hand.page.wait_for_selector("th:has-text('step 3')")
    hand.type(field, "nothing")  # what is no number is not taken, and the field says what holds
    hand.page.wait_for_function("() => !location.hash.includes('before=')")
    assert hand.page.input_value(field) == "0"


def _site_of(word: str) -> str:
    return word.replace("(model) ", ":")


def test_a_weight_over_time_takes_three_and_plays(hand: Hand, folder: Path) -> None:
    hand.click(".runtable a:text-is('rate-0.01')")
    hand.page.wait_for_selector("#search")
    hand.type("#search", "head:param.weight", key="Enter")
    hand.page.wait_for_selector("[data-testid=picture]")
    hand.page.locator("[data-testid=picture]").scroll_into_view_if_needed()
    ramp = hand.page.locator(".tensor .under").inner_text().split("point")[0]
    hand.click("button[aria-label=Play]")
    hand.page.wait_for_function("() => location.hash.includes('step=2')")
    assert hand.page.locator(".tensor .under").inner_text().split("point")[0] == ramp  # colours stay
    hand.page.select_option("select[aria-label=Minus]", "step 0")
    hand.page.wait_for_selector(".tensor .under:has-text('difference')")
    assert hand.count == 3


def test_the_difference_of_two_steps_of_a_tensor_is_exact(hand: Hand, folder: Path) -> None:
    run = tt.open(folder / "rate-0.01")
    site = "head:param.weight"
    expected = run.tensor(site, step=20).numpy() - run.tensor(site, step=0).numpy()
    page = hand.visit.go(f"#/site?run=rate-0.01&site={site}&step=20&minusStep=0")
    canvas = page.locator("[data-testid=picture]")
    canvas.wait_for()
    page.wait_for_selector(".tensor .under:has-text('difference')")
    canvas.scroll_into_view_if_needed()
    left, top, width, height = (
        float(canvas.get_attribute(f"data-{name}")) for name in ("left", "top", "cell-width", "cell-height")
    )
    canvas.hover(position={"x": left + 4.5 * width, "y": top + 7.5 * height})
    place, _, value = page.locator("[data-testid=value]").inner_text().partition(" = ")
    assert place == "[7, 4]"
    assert np.float32(float(value)) == expected[7, 4]


def test_a_shared_link_restores_everything(hand: Hand, browser: Any, server: ViewerServer) -> None:
    hand.click(".runtable a:text-is('rate-0.003')")
    hand.visit.drawn("rms")
    hand.choose("Kind", "grad_output")
    hand.choose("Statistic", "absmax")
    hand.visit.drawn("absmax")
    hand.drag(hand.visit.cell(0.3, 0.25), hand.visit.cell(0.6, 0.75))
    hand.page.wait_for_function("() => location.hash.includes('bottom=')")
    hand.page.wait_for_timeout(300)
    names, drawn = (hand.page.get_attribute(".heatmap", f"data-{what}") for what in ("names", "range"))
    with Visit(browser, hand.page.url) as other:
        other.go("")
        other.drawn("absmax")
        other.page.wait_for_selector(f".heatmap[data-range='{drawn}']")
        assert other.page.get_attribute(".heatmap", "data-names") == names
        assert other.page.locator("select[aria-label=Run]").input_value() == "rate-0.003"


def test_a_picture_and_its_numbers_can_be_taken_along(hand: Hand, folder: Path) -> None:
    hand.click(".runtable a:text-is('rate-0.003')")
    hand.visit.drawn("rms")
    assert hand.save("PNG", ".heatmap").startswith(b"\x89PNG")
    drawing = ElementTree.fromstring(hand.save("SVG", ".heatmap"))
    texts = "".join(drawing.itertext())
    assert "blocks.0.attn" in texts
    assert drawing.findall(".//{http://www.w3.org/2000/svg}image")
    rows = list(csv.DictReader(io.StringIO(hand.save("CSV", ".heatmap").decode())))
    series = tt.open(folder / "rate-0.003").series("blocks.0:output", "rms")
    got = [float(row["least"]) for row in rows if row["row"] == "blocks.0"]
    np.testing.assert_allclose(got, series.values, rtol=1e-6)
    hand.click("nav.views a:text('Scalars')")
    hand.page.wait_for_selector(".uplot canvas")
    lines = list(csv.reader(io.StringIO(hand.save("CSV", "[data-testid=scalar]").decode())))
    assert lines[0] == ["step", "rate-0.003"]
    loss = tt.open(folder / "rate-0.003").series(":value.loss", "value").values
    np.testing.assert_allclose([float(line[1]) for line in lines[1:]], loss)
    assert b"<path" in hand.save("SVG", "[data-testid=scalar]")


def test_one_of_a_hundred_runs_is_found_by_a_label_in_two(browser: Any, tmp_path: Path) -> None:
    for number in range(100):
        labels = {
            "lr": number / 1000,
            "optimizer": ("adam", "sgd", "lion")[number % 3],
            "team": {"name": f"t{number % 7}"},
        }
        small_run(tmp_path / f"run-{number:03d}", steps=3, labels=labels)
    with ViewerServer(Catalog.open([tmp_path])) as server, Visit(browser, server.address) as visit:
        page = visit.go("")
        page.wait_for_selector("text=100 runs")
        page.wait_for_selector("th:has-text('optimizer')")
        hand = Hand(visit)
        hand.type("#filter", "lr > 0.04 and lr <= 0.05 and optimizer = lion")
        page.wait_for_selector("text=4 of 100 runs")
        names = set(page.locator(".runtable td.name a").all_inner_texts())
        assert names == {f"run-{n:03d}" for n in range(41, 51) if n % 3 == 2}
        hand.click(".runtable a:text-is('run-044')")
        visit.drawn("rms")
        assert hand.count == 2


def test_a_live_run_keeps_its_zoom_on_the_map(browser: Any, tmp_path: Path) -> None:
    writer = small_run(tmp_path / "live", steps=30, close=False)
    try:
        with (
            ViewerServer(Catalog.open([tmp_path / "live"])) as server,
            Visit(browser, server.address) as visit,
        ):
            page = visit.go("#/map?from=5&to=14")
            page.wait_for_selector(".heatmap[data-range='5-14']")
            block = ScalarBlock(("a:output", "b:output"), ("rms", "std"), np.ones((2, 2)))
            for step in range(30, 36):
                writer.write(StepRecord(step, 7, None, "train", 1100.0, (block,), ()))
            writer.flush()
            page.wait_for_selector("text=36 steps")
            page.wait_for_timeout(300)
            assert page.get_attribute(".heatmap", "data-range") == "5-14"
    finally:
        writer.close()


def test_a_page_goes_on_by_itself_when_its_server_comes_back(browser: Any, tmp_path: Path) -> None:
    small_run(tmp_path / "run", steps=8)
    with ViewerServer(Catalog.open([tmp_path / "run"])) as server:
        port = server.port
        page = Visit(browser, server.address).go("#/map")
        page.wait_for_selector(".heatmap[data-drawn$='8x2']")
    page.wait_for_selector("text=goes on by itself", timeout=15_000)
    assert page.locator(".heatmap").count() == 1  # what was drawn stays
    with ViewerServer(Catalog.open([tmp_path / "run"]), port=port):
        page.wait_for_selector(".alarm", state="detached", timeout=15_000)
        page.keyboard.press("]")
        page.wait_for_selector(".heatmap[data-drawn^='std']")
    page.context.close()
