"""The page in a real browser, on runs that these tests record: every view, and no word to anybody else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from tests.optional import need
from tests.viewer.browsing import Visit, open_page, wait_for_colours
from tests.viewer.recordings import train

import torchtap as tt
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import ViewerServer


@pytest.fixture(scope="module")
def server(browser: Any, run_folder: Path, other_folder: Path) -> Iterator[ViewerServer]:
    with ViewerServer(Catalog.open([run_folder, other_folder])) as started:
        yield started


@pytest.fixture
def visit(browser: Any, server: ViewerServer) -> Iterator[Visit]:
    with Visit(browser, server.address) as opened:
        yield opened


def test_the_map_is_drawn_and_answers_to_the_pointer_and_a_click(visit: Visit) -> None:
    page = visit.go("#/map")
    assert visit.drawn("rms").endswith(":30x25")
    wait_for_colours(page, ".heatmap canvas", more_than=40)
    box = page.locator("[data-testid=map]").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.4)
    tip = page.locator(".tip")
    assert "step " in tip.inner_text()
    site = tip.locator("b").inner_text()
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("section.site h1")
    assert page.locator("section.site h1").inner_text() == site
    assert f"site={quote(site, safe='')}" in page.url


def test_statistic_kind_and_scale_are_chosen_and_carried_by_the_address(visit: Visit, browser: Any) -> None:
    page = visit.go("#/map")
    visit.drawn("rms")
    page.select_option("select[aria-label=Kind]", "param_grad")
    page.select_option("select[aria-label=Statistic]", "grad/weight")
    visit.drawn("grad/weight")
    page.get_by_role("button", name="linear").click()
    address = page.url
    assert "kind=param_grad" in address
    assert "scale=linear" in address
    with Visit(browser, address) as again:
        again.go("")
        again.drawn("grad/weight")
        assert again.page.locator("select[aria-label=Kind]").input_value() == "param_grad"
        assert again.page.locator(".switch button[aria-pressed=true]").inner_text() == "linear"


def test_dragging_zooms_into_steps_and_escape_comes_back(visit: Visit) -> None:
    page = visit.go("#/map")
    whole = visit.drawn("rms")
    box = page.locator("[data-testid=map]").bounding_box()
    y = box["y"] + box["height"] * 0.4
    page.mouse.move(box["x"] + box["width"] * 0.4, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=4)
    page.mouse.up()
    page.wait_for_function("() => location.hash.includes('from=')")
    page.wait_for_function(f"() => document.querySelector('.heatmap').dataset.drawn !== '{whole}'")
    columns = int(visit.drawn("rms").rpartition(":")[2].partition("x")[0])
    assert 3 <= columns < 15
    page.keyboard.press("Escape")
    page.wait_for_selector(f".heatmap[data-drawn='{whole}']")


def test_keys_move_the_cross_hair_change_the_statistic_and_the_view(visit: Visit) -> None:
    page = visit.go("#/map")
    visit.drawn("rms")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector(".tip")
    page.keyboard.press("]")
    page.wait_for_function("() => location.hash.includes('statistic=')")
    page.keyboard.press("8")
    page.wait_for_selector("section.findings")
    page.keyboard.press("?")
    page.wait_for_selector("dialog")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")  # it gives the focus back when it goes
    page.keyboard.press("/")
    page.wait_for_function("() => document.activeElement.id === 'search'")


def test_search_finds_sites_and_opens_them(visit: Visit) -> None:
    page = visit.go("#/map")
    page.fill("#search", "blocks.1.attn.qkv:out")
    found = page.locator(".tree a.site")
    assert found.all_inner_texts()[0].startswith("blocks.1.attn.qkv:output")
    page.keyboard.press("Enter")
    page.wait_for_selector("section.site h1")
    assert page.locator("section.site h1").inner_text() == "blocks.1.attn.qkv:output"
    page.fill("#search", "nothing is called this")
    assert "Nothing" in page.locator(".tree .list").inner_text()


def test_the_tree_has_classes_parameters_and_health(visit: Visit) -> None:
    page = visit.go("#/map")
    page.wait_for_selector(".tree .health.nan")
    blocks = page.locator("[data-module=blocks]")
    assert "ModuleList" in blocks.inner_text()
    assert blocks.locator(".health.nan").count() >= 1
    assert page.locator("[data-module=embed] .class").first.inner_text() == "Embedding"


def test_a_site_shows_series_histograms_and_what_is_wrong_with_it(visit: Visit) -> None:
    page = visit.go("#/site?site=blocks.1.mlp.down:output")
    page.wait_for_selector(".uplot canvas")
    assert page.locator(".uplot").count() == 2
    wait_for_colours(page, "[data-testid=histograms]", more_than=10)
    assert "NaN" in page.locator(".finding.error").inner_text()
    page.get_by_role("button", name="ridges").click()
    page.locator(".chips .chip", has_text="zeros").click()
    page.wait_for_function("() => location.hash.includes('zeros')")


def test_the_value_under_the_cursor_is_the_stored_one(visit: Visit, run_folder: Path) -> None:
    stored = tt.open(run_folder).tensor("blocks.0:output", step=10).numpy()
    page = visit.go("#/site?site=blocks.0:output&step=10&index=3,0,0")
    canvas = page.locator("[data-testid=picture]")
    canvas.wait_for()
    canvas.scroll_into_view_if_needed()
    left, top, width, height = (
        float(canvas.get_attribute(f"data-{name}")) for name in ("left", "top", "cell-width", "cell-height")
    )
    for row, column in ((0, 0), (7, 21), (11, 31)):
        canvas.hover(position={"x": left + (column + 0.5) * width, "y": top + (row + 0.5) * height})
        place, _, value = page.locator("[data-testid=value]").inner_text().partition(" = ")
        assert place == f"[3, {row}, {column}]"
        assert np.float32(float(value)) == stored[3, row, column]


def test_axes_of_a_tensor_can_be_exchanged(visit: Visit, run_folder: Path) -> None:
    stored = tt.open(run_folder).tensor("blocks.0:output", step=10).numpy()
    page = visit.go("#/site?site=blocks.0:output&step=10&index=0,5,0&down=2&across=0")
    canvas = page.locator("[data-testid=picture]")
    canvas.wait_for()
    canvas.scroll_into_view_if_needed()
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    place, _, value = page.locator("[data-testid=value]").inner_text().partition(" = ")
    assert place == "[1, 5, 1]"
    assert np.float32(float(value)) == stored[1, 5, 1]


def test_attention_has_heads_layers_and_the_run_s_tokens(visit: Visit, run_folder: Path) -> None:
    stored = tt.open(run_folder).tensor("blocks.1.attn:attention", step=5).numpy()
    page = visit.go("#/attention?site=blocks.1.attn:attention&step=5&head=2")
    canvas = page.locator("[data-testid=picture]")
    canvas.wait_for()
    assert page.locator(".heads button").count() == 4
    left, top, width, height = (
        float(canvas.get_attribute(f"data-{name}")) for name in ("left", "top", "cell-width", "cell-height")
    )
    canvas.hover(position={"x": left + 1.5 * width, "y": top + 4.5 * height})
    said, _, value = page.locator("[data-testid=value]").inner_text().partition(" = ")
    assert said == "“the” looks at “tap”"
    assert np.float32(float(value)) == stored[0, 2, 4, 1]
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => location.hash.includes('head=3')")


def test_findings_lead_to_the_map_and_the_site(visit: Visit) -> None:
    page = visit.go("#/findings")
    first = page.locator("article.finding").first
    assert "NaN" in first.inner_text()
    assert "blocks.1.mlp.down:output" in first.inner_text()
    page.wait_for_selector("text=it holds modules and is not called itself")
    first.get_by_text("show on the map").click()
    visit.drawn("nans")
    page.go_back()
    page.locator("article.finding").first.get_by_text("open blocks.1.mlp.down:output").click()
    page.wait_for_selector("section.site")


def test_findings_list_their_evidence_with_the_series_that_it_is_from(visit: Visit, run_folder: Path) -> None:
    expected = next(each for each in tt.diagnose(run_folder) if len(each.evidence))
    page = visit.go("#/findings?run=first")
    found = page.locator("article.finding", has_text=expected.message).first
    items = found.get_by_role("list", name="Evidence").locator("> li")
    items.first.wait_for()
    assert items.count() == len(expected.evidence)
    for item, number in zip(items.all(), expected.evidence, strict=True):
        text = item.inner_text()
        assert text.strip().startswith(f"{number.name}:")
        assert float(item.locator("b").inner_text()) == pytest.approx(number.value, rel=5e-3)
        if number.step is not None:
            assert f"at step {number.step}" in text
        if number.site and number.statistic:
            assert item.locator("svg.spark").count() == 1


def test_runs_lie_over_each_other_and_the_first_divergence_is_named(visit: Visit) -> None:
    page = visit.go("#/compare?run=first&site=head:output&statistic=std")
    page.wait_for_selector(".uplot canvas")
    assert page.locator(".chips .chip[aria-pressed=true]").all_inner_texts() == ["first", "second"]
    page.wait_for_selector(".verdict", timeout=60_000)
    assert "First divergence" in page.locator("section.compare").inner_text()
    page.locator(".chips .chip", has_text="second").click()
    page.wait_for_function("() => location.hash.includes('with=first')")


_LEAVES_AT_ONCE = """new MutationObserver((_, own) => {
    if (!document.querySelector("#app > *")) return;
    own.disconnect();
    history.replaceState(null, "", "#/runs?filter=here");
    window.dispatchEvent(new HashChangeEvent("hashchange"));
}).observe(document, { childList: true, subtree: true });"""


def test_an_address_that_changes_while_the_page_is_first_drawn_is_shown(visit: Visit) -> None:
    visit.page.add_init_script(_LEAVES_AT_ONCE)
    page = visit.go("#/runs")
    # Not wait_for_function: it evaluates text in the page, which the page's policy forbids.
    need("playwright.sync_api").expect(page.locator("#filter")).to_have_value("here")


def test_dark_and_light_follow_the_system_until_chosen(browser: Any, server: ViewerServer) -> None:
    with Visit(browser, server.address, dark=True) as dark:
        page = dark.go("#/map")
        dark.drawn("rms")
        assert page.get_attribute("html", "data-theme") == "dark"
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.keyboard.press("t")
        assert page.get_attribute("html", "data-theme") == "light"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != colour
        page.reload()
        assert page.get_attribute("html", "data-theme") == "light"


def test_an_unknown_site_and_an_unknown_run_say_so(visit: Visit) -> None:
    page = visit.go("#/site?site=no.such:output")
    assert "no site called" in page.locator("section.site").inner_text()
    page = visit.go("#/site?run=99&site=head:output")
    page.wait_for_selector("text=There is no run called 99 here")


def test_the_page_follows_a_training_that_still_writes(browser: Any, tmp_path: Path) -> None:
    taps = [tt.tap("blocks.*:output", keep=tt.Stats())]
    go_on, half_way = threading.Event(), threading.Event()

    def each_step(step: int, watch: Any) -> None:
        if step == 4:
            watch.flush()
            half_way.set()
            assert go_on.wait(60)

    training = threading.Thread(
        target=train, args=(tmp_path / "live",), kwargs={"steps": 9, "taps": taps, "each_step": each_step}
    )
    training.start()
    assert half_way.wait(60)
    try:
        with (
            ViewerServer(Catalog.open([tmp_path / "live"])) as server,
            Visit(browser, server.address) as visit,
        ):
            page = visit.go("#/map")
            assert visit.drawn("rms").endswith(":5x2")
            assert page.locator(".live").inner_text() == "live"
            go_on.set()
            training.join()
            page.wait_for_selector(".heatmap[data-drawn$=':9x2']")
            page.wait_for_function("() => !document.querySelector('.live')")
    finally:
        go_on.set()
        training.join()


def test_markup_in_names_is_text(browser: Any, tmp_path: Path) -> None:
    from torchtap.store.record import ScalarBlock, StepRecord
    from torchtap.store.write.writer import RunWriter

    markup = '<img src=x onerror="window.hacked=1">'
    names = (f"{markup}:output", f"a.{markup}:output", "__proto__:output")
    model = {"name": markup, "path": "", "class": markup, "children": []}
    with RunWriter(tmp_path / "run", manifest={"model": model, "labels": {"tokens": [markup]}}) as writer:
        for step in range(3):
            block = ScalarBlock(names, ("std", "nans", "infs"), np.ones((3, 3)))
            writer.write(StepRecord(step, None, None, "train", 1.0, (block,), ()))
        writer.event("coverage", missing=[{"site": markup, "reason": markup}])
    with ViewerServer(Catalog.open([tmp_path / "run"])) as server, Visit(browser, server.address) as visit:
        for view in ("#/map", f"#/site?site={quote(names[0])}", "#/findings", "#/attention", "#/compare"):
            page = visit.go(view)
            page.wait_for_selector("main section")
            page.reload()
            page.wait_for_selector("main section")
            assert page.evaluate("window.hacked") is None
            assert page.locator("main img, .tree img").count() == 0


def test_a_report_needs_no_server_and_asks_nobody(browser: Any, run_folder: Path, tmp_path: Path) -> None:
    from torchtap.viewer.report import write_report

    report = write_report([run_folder], tmp_path / "report.html", sites=["blocks.*.attn:attention", "head:*"])
    page, errors, asked = open_page(browser)
    page.goto(report.path.as_uri())
    page.wait_for_selector(".heatmap[data-drawn*=rms]")
    wait_for_colours(page, ".heatmap canvas", more_than=40)
    page.goto(report.path.as_uri() + "#/map?under=blocks.0.attn")
    page.wait_for_selector(".heatmap[data-names='blocks.0.attn.qkv | blocks.0.attn.out | blocks.0.attn']")
    page.goto(report.path.as_uri() + "#/findings")
    assert "NaN" in page.locator("article.finding").first.inner_text()
    page.goto(report.path.as_uri() + "#/site?site=head:output")
    page.wait_for_selector(".uplot canvas")
    page.goto(report.path.as_uri() + "#/attention?site=blocks.0.attn:attention")
    page.wait_for_selector("[data-testid=picture]")
    page.goto(report.path.as_uri() + "#/site?site=norm:output")
    page.wait_for_selector("text=not part of the report")
    page.context.close()
    assert errors == []
    assert all(address.startswith(("file:", "data:", "blob:")) for address in asked)


def test_a_given_comparison_is_drawn_along_depth(browser: Any, run_folder: Path, tmp_path: Path) -> None:
    rows = [
        {"site": f"blocks.{i}:output", "index": i, "error": 10.0 ** (i - 6), "floor": 1e-5, "status": s}
        for i, s in enumerate(["equal", "within", "diverged"])
    ]
    rows.append({"site": "head:output", "index": 3, "error": "inf", "floor": None, "status": "not finite"})
    given = {"rows": rows, "first": rows[2], "verdict": "blocks.2 is the first to differ"}
    catalog = Catalog.open([run_folder], json.loads(json.dumps(given)))
    with ViewerServer(catalog) as server, Visit(browser, server.address) as visit:
        page = visit.go("#/compare")
        page.wait_for_selector(".uplot canvas")
        said = page.locator("section.compare").inner_text()
        assert "blocks.2 is the first to differ" in said
        assert "First divergence blocks.2:output" in said
        assert page.locator(".scroll tbody tr").count() == 2
