"""The page for everybody: screen readers, small screens, other languages, and names that mean harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.viewer.browsing import Hand, Visit
from tests.viewer.recordings import small_run

from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import ViewerServer

AXE = Path(__file__).parents[2] / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
VIEWS = {
    "runs": ("#/runs", ".runtable td.name"),
    "scatter": ("#/runs?show=scatter&sx=steps", "svg.scatter .dot"),
    "parallel": ("#/runs?show=parallel", "svg.parallel .thread"),
    "layers": ("#/runs?show=layers&sx=steps", ".sweep .rankmap"),
    "groups": ("#/runs?group=status", "tr.grouprow"),
    "scalars": ("#/scalars?with=first,second", ".uplot canvas"),
    "map": ("#/map?run=first", ".heatmap[data-drawn]"),
    "site": ("#/site?run=first&site=blocks.0:output", "[data-testid=picture]"),
    "attention": ("#/attention?run=first", "[data-testid=picture]"),
    "changes": ("#/changes?run=first", "[data-testid=changes] td"),
    "compare": ("#/compare?run=first&site=head:output", ".verdict"),
    "findings": ("#/findings?run=first", "article.finding"),
}


@pytest.fixture(scope="module")
def server(run_folder: Path, other_folder: Path) -> Iterator[ViewerServer]:
    with ViewerServer(Catalog.open([run_folder, other_folder])) as started:
        yield started


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_against_any_view(browser: Any, server: ViewerServer, dark: bool) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed (`make frontend` does)")
    with Visit(browser, server.address, dark=dark) as visit:
        for name, (address, wait) in VIEWS.items():
            page = visit.go(address)
            page.wait_for_selector(wait, timeout=30_000)
            page.evaluate(AXE.read_text())
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            said = [
                (v["id"], v["impact"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found["violations"]
            ]
            assert said == [], (name, said)


@pytest.mark.parametrize("width", [390, 1024])
def test_a_small_screen_shows_every_view_without_scrolling_sideways(
    browser: Any, server: ViewerServer, width: int
) -> None:
    with Visit(browser, server.address, width=width, height=800) as visit:
        for name, (address, wait) in VIEWS.items():
            page = visit.go(address)
            page.wait_for_selector(wait, timeout=30_000)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, name
            main = page.evaluate(
                "document.querySelector('main').scrollWidth - document.querySelector('main').clientWidth"
            )
            assert main <= 1, name


def test_the_model_opens_as_a_drawer_on_a_phone(browser: Any, server: ViewerServer) -> None:
    with Visit(browser, server.address, width=390, height=800) as visit:
        page = visit.go("#/map?run=first")
        visit.drawn("rms")
        assert not page.locator(".tree").is_visible()
        hand = Hand(visit)
        hand.click(".menu-button")
        hand.type("#search", "head:output", key="Enter")
        page.wait_for_selector("section.site h1:has-text('head:output')")
        page.wait_for_selector(".tree", state="hidden")  # it closes with the next paint


def test_the_words_under_a_finger_stay_on_the_screen(browser: Any, server: ViewerServer) -> None:
    with Visit(browser, server.address, width=390, height=800) as visit:
        visit.go("#/map?run=first")
        visit.drawn("rms")
        for column in (0.02, 0.5, 0.98):
            box = visit.point(0.5, column).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390


def test_arrows_choose_among_what_was_found(browser: Any, server: ViewerServer) -> None:
    with Visit(browser, server.address) as visit:
        page = visit.go("#/map?run=first")
        page.fill("#search", "blocks.0.attn")
        second = page.locator(".tree a.site").nth(1).inner_text().split("\n")[0]
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_selector("section.site h1")
        assert page.locator("section.site h1").inner_text() == second


def test_typed_steps_zoom_the_map_however_they_are_grouped(browser: Any, server: ViewerServer) -> None:
    with Visit(browser, server.address) as visit:
        page = visit.go("#/map?run=first")
        visit.drawn("rms")
        page.click("details.more summary")
        page.fill("input[aria-label='First step']", "0.005")
        page.keyboard.press("Tab")
        page.wait_for_selector(".heatmap[data-range='5-29']")


@pytest.mark.parametrize("locale", ["de-DE", "ar-EG", "hi-IN"])
def test_numbers_read_the_same_in_every_language(browser: Any, server: ViewerServer, locale: str) -> None:
    with Visit(browser, server.address, locale=locale) as visit:
        page = visit.go("#/runs")
        page.wait_for_selector(".runtable td.name")
        assert "30" in page.locator(".runtable tr:has-text('second')").inner_text()
        page = visit.go("#/map?run=first")
        visit.drawn("rms")
        assert "step 15" in visit.point(0.5, 15.5 / 30).inner_text()


def test_names_that_mean_harm_are_text_in_every_view(browser: Any, tmp_path: Path) -> None:
    markup = '<img src=x onerror="window.hacked=1">'
    proto = ("__proto__", "constructor", "toString")
    names = (
        f"{markup}:output",
        *(f"{name}:output" for name in proto),
        f":value.{markup}",
        ":value.__proto__",
    )
    labels = {markup: markup, "__proto__": 3, "constructor": "x", "lr": 0.1, "nested": {"toString": 1}}
    for run in ("a", "b<i>,\\;&=#?%", "__proto__"):
        with RunWriter(tmp_path / "runs" / run, manifest={"labels": labels, "created": markup}) as writer:
            for step in range(4):
                outputs = ScalarBlock(names[:4], ("std", "constructor", "nans"), np.ones((4, 3)))
                logged = ScalarBlock(names[4:], ("value",), np.ones((2, 1)))
                writer.write(StepRecord(step, None, None, "train", 1.0, (outputs, logged), ()))
    with ViewerServer(Catalog.open([tmp_path / "runs"])) as server, Visit(browser, server.address) as visit:
        page = visit.go("#/runs?filter=constructor")
        page.wait_for_selector(".runtable td.name")
        assert page.locator(".runtable td.name").count() == 3
        for run in ("b<i>", "__proto__"):
            page = visit.go("#/runs")
            page.wait_for_selector(".runtable td.name")
            page.locator(".runtable td.name a", has_text=run).click()
            visit.drawn(":")
            for view in ("Site", "Scalars", "Changes", "Compare", "Findings", "Attention"):
                page.click(f"nav.views a:text('{view}')")
                page.wait_for_selector("main section")
                page.wait_for_timeout(150)
                assert page.evaluate("window.hacked") is None
                assert page.locator("main img:not(.rankmap), .tree img").count() == 0
        # Runs without a comparable site cannot be compared; the browser notes that answer as well.
        visit.errors[:] = [error for error in visit.errors if "422" not in error]


def test_one_run_that_diverged_does_not_flatten_the_rest(browser: Any, tmp_path: Path) -> None:
    for number, scale in enumerate((1.0, 1.1, 1e9)):
        small_run(tmp_path / f"run-{number}", scale=scale)
    with ViewerServer(Catalog.open([tmp_path])) as server, Visit(browser, server.address) as visit:
        page = visit.go("#/scalars?with=run-0,run-1,run-2")
        page.wait_for_selector("[data-testid=scalar][data-lines='3'] .uplot canvas")
        assert "outliers lie beyond the axis" in page.locator("[data-testid=scalar]").inner_text()
        page.click("button:has-text('ignore outliers')")
        page.wait_for_selector("text=outliers lie beyond the axis", state="detached")
