"""What the page once said wrongly, each held in a browser: names, numbers, zooms, links, runs that are gone."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.viewer.browsing import Hand, Visit, open_page
from tests.viewer.recordings import small_run, train

import torchtap as tt
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter
from torchtap.viewer.report import write_report
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import ViewerServer


@pytest.fixture(scope="module")
def server(run_folder: Path, other_folder: Path) -> Iterator[ViewerServer]:
    with ViewerServer(Catalog.open([run_folder, other_folder])) as started:
        yield started


@pytest.fixture
def visit(browser: Any, server: ViewerServer) -> Iterator[Visit]:
    with Visit(browser, server.address) as opened:
        yield opened


def test_switching_to_a_run_of_another_model_shows_its_own_names_at_once(
    browser: Any, tmp_path: Path
) -> None:
    small_run(tmp_path / "one", sites=("encoder:output", "decoder:output"))
    small_run(tmp_path / "two", sites=("stem:output", "trunk:output"))
    with (
        ViewerServer(Catalog.open([tmp_path / "one", tmp_path / "two"])) as server,
        Visit(browser, server.address) as visit,
    ):
        page = visit.go("#/map?run=one")
        page.wait_for_selector(".heatmap[data-names='encoder | decoder']")
        page.select_option("select[aria-label=Run]", "two")
        page.wait_for_selector(".heatmap[data-names='stem | trunk']")
        assert "stem:output" in visit.point(0.2, 0.5).inner_text()


def test_a_report_of_two_runs_compares_the_statistic_that_it_names(
    browser: Any, run_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    report = write_report([run_folder, other_folder], tmp_path / "two.html", sites=["head:output"])
    page, errors, _ = open_page(browser)
    page.goto(report.path.as_uri() + "#/compare?run=first&site=head:output&statistic=rms")
    page.wait_for_selector(".u-legend")
    legend = page.locator("section.compare .panel:last-child .u-legend")
    expected = tt.open(other_folder).series("head:output", "rms").values[-1]
    row = legend.locator("tr", has_text="second").locator(".u-value")
    page.wait_for_function("e => e.textContent.trim() !== '–'", arg=row.element_handle())
    assert math.isclose(float(row.inner_text()), expected, rel_tol=1e-3)
    assert legend.locator("tr", has_text="first").count() == 1
    page.goto(report.path.as_uri() + "#/compare?run=first&site=norm:output&statistic=rms")
    page.wait_for_selector("text=not part of the report: first, second")
    page.context.close()
    assert errors == []


def test_a_report_holds_logged_values_before_anything_else(
    browser: Any, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtap.viewer.report._BUDGET", 1)
    report = write_report([run_folder], tmp_path / "small.html")
    assert len(report.left_out) > 10
    page, errors, _ = open_page(browser)
    page.goto(report.path.as_uri() + "#/scalars")
    page.wait_for_selector("[data-testid=scalar][data-lines='1'] .uplot canvas")
    page.context.close()
    assert errors == []


def test_after_a_wheel_the_words_tell_what_is_under_the_pointer(visit: Visit) -> None:
    page = visit.go("#/map?run=first")
    visit.drawn("rms")
    before = visit.point(0.4, 0.2).inner_text()
    page.mouse.wheel(0, 600)  # out: the whole stays
    for _ in range(6):
        page.mouse.wheel(0, -300)
    page.wait_for_function("() => location.hash.includes('from=')")
    page.wait_for_function("() => Number(document.querySelector('.heatmap').dataset.range.split('-')[0]) > 0")
    low, high = (int(n) for n in page.get_attribute(".heatmap", "data-range").split("-"))
    shown = int(page.locator(".tip span").first.inner_text().removeprefix("step "))
    columns = high - low + 1
    assert shown == low + math.floor(0.2 * columns) or abs(shown - (low + 0.2 * columns)) <= 1
    assert before  # it was there before, and the mouse has not moved since


def test_the_zoom_of_a_site_survives_new_values_and_is_in_the_address(browser: Any, tmp_path: Path) -> None:
    writer = small_run(tmp_path / "live", steps=40, close=False)
    try:
        with (
            ViewerServer(Catalog.open([tmp_path / "live"])) as server,
            Visit(browser, server.address) as visit,
        ):
            page = visit.go("#/site?site=a:output")
            over = page.locator(".u-over").first
            over.wait_for()
            box = over.bounding_box()
            y = box["y"] + box["height"] / 2
            hand = Hand(visit)
            hand.drag((box["x"] + 0.25 * box["width"], y), (box["x"] + 0.5 * box["width"], y))
            page.wait_for_function("() => location.hash.includes('from=')")
            zoomed = page.get_attribute(".chart", "data-range")
            assert zoomed == f"{visit.hash['from']}-{visit.hash['to']}"
            block = ScalarBlock(("a:output",), ("rms", "std"), np.ones((1, 2)))
            for step in range(40, 46):
                writer.write(StepRecord(step, 8, None, "train", 1100.0, (block,), ()))
            writer.flush()
            page.wait_for_selector("text=46 steps")
            page.wait_for_timeout(300)
            assert page.get_attribute(".chart", "data-range") == zoomed
    finally:
        writer.close()


def test_a_loss_of_nan_has_a_band_and_is_red_on_the_map(visit: Visit) -> None:
    page = visit.go("#/site?run=first&site=:value.loss")
    page.wait_for_selector(".uplot canvas")
    assert page.locator("section.site h1").inner_text() == "loss"
    red = """() => {
        const canvas = document.querySelector(".uplot canvas");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const soft = (i) => data[i] === 253 && data[i + 1] === 234 && data[i + 2] === 240;
        for (let i = 0; i < data.length; i += 4) if (soft(i)) return true;
        return false;
    }"""
    page.wait_for_function(red)
    page = visit.go("#/map?run=first&kind=value")
    visit.drawn("value")
    page.wait_for_selector("text=NaN or inf")
    assert "no finite value" in visit.point(0.5, 0.95).inner_text()


def test_the_norm_of_nothing_but_nan_is_not_zero(visit: Visit, run_folder: Path) -> None:
    assert tt.open(run_folder).series("head:output", "l2").values[-1] == 0.0  # as it was recorded
    page = visit.go("#/map?run=first&statistic=l2&under=head")
    visit.drawn("l2")
    page.wait_for_selector(".badge")
    page.wait_for_timeout(300)
    tip = visit.point(0.5, 0.98).inner_text()
    assert "l2 no finite value" in tip
    assert "l2 0" not in tip


def test_the_zoom_stays_from_view_to_view_and_from_run_to_run(visit: Visit) -> None:
    page = visit.go("#/map?run=first&kind=param_grad&statistic=l2&from=5&to=12&site=head:output")
    visit.drawn("l2")
    page.click("nav.views a:text('Site')")
    page.wait_for_selector("section.site h1")
    page.click("nav.views a:text('Map')")
    visit.drawn("l2")
    wanted = {"from": "5", "to": "12", "kind": "param_grad", "statistic": "l2", "site": "head:output"}
    assert wanted.items() <= visit.hash.items()
    page.select_option("select[aria-label=Run]", "second")
    visit.drawn("l2")
    assert {**wanted, "run": "second"}.items() <= visit.hash.items()
    page.click(".tree [data-module=head] > .module a.name")
    page.wait_for_function("() => location.hash.includes('under=head')")
    assert wanted.items() <= visit.hash.items()
    visit.drawn("l2")
    page.mouse.click(*visit.cell(0.5, 0.5))
    page.wait_for_selector("section.site h1")
    assert {
        "kind": "param_grad",
        "statistic": "l2",
        "from": "5",
        "run": "second",
    }.items() <= visit.hash.items()


def test_a_link_names_its_run_and_carries_the_token(
    browser: Any, run_folder: Path, other_folder: Path
) -> None:
    catalog = Catalog.open([other_folder, run_folder])
    with ViewerServer(catalog, host="0.0.0.0", names=("localhost",)) as server:
        local = server.address.replace(server.address.split("/")[2].rpartition(":")[0], "localhost")
        with Visit(browser, local) as visit:
            page = visit.go("#/map?run=first")
            visit.drawn("rms")
            page.select_option("select[aria-label=Statistic]", "std")
            visit.drawn("std")
            copied = page.url
        assert f"token={server.policy.token}" in copied
        with Visit(browser, copied) as other:  # somebody else, with no cookie
            other.go("")
            other.drawn("std")
            assert other.page.locator("select[aria-label=Run]").input_value() == "first"


def test_a_deleted_run_is_said_to_be_gone(browser: Any, tmp_path: Path) -> None:
    small_run(tmp_path / "runs" / "here")
    small_run(tmp_path / "runs" / "gone")
    with ViewerServer(Catalog.open([tmp_path / "runs"])) as server, Visit(browser, server.address) as visit:
        page = visit.go("#/map?run=gone")
        visit.drawn("rms")
        shutil.rmtree(tmp_path / "runs" / "gone")
        page.wait_for_selector("text=There is no run called gone here")
        page.click("text=Show the runs that are there")
        page.wait_for_selector(".runtable a:text-is('here')")
        assert page.locator(".runtable tbody tr").count() == 1
        # Whether the page asked once more, of a run that is half gone or gone, is a race; the browser notes the answer.
        refused = ("404 (Not Found)", "422 (Unprocessable Entity)")
        visit.errors[:] = [error for error in visit.errors if not error.endswith(refused)]


def test_the_error_along_depth_is_of_one_kind_at_a_time(browser: Any, tmp_path: Path) -> None:
    taps = [tt.tap("*:output", keep=tt.Stats()), tt.tap("*:grad_output", keep=tt.Stats())]
    for name, gain in (("a", 1.0), ("b", 1.05)):
        train(tmp_path / name, steps=3, taps=taps, gain=gain)
    paths = [tmp_path / "a", tmp_path / "b"]
    with ViewerServer(Catalog.open(paths)) as server, Visit(browser, server.address) as visit:
        page = visit.go("#/compare?a=a&b=b")
        kinds = page.locator("select[aria-label='Depth of'] option")
        kinds.first.wait_for(state="attached")
        assert {"Outputs", "Output gradients"} <= set(kinds.all_inner_texts())
        rows = set()
        for kind in ("output", "grad_output"):
            page.select_option("select[aria-label='Depth of']", kind)
            page.wait_for_timeout(200)
            rows.add(page.get_attribute("section.compare .chart", "data-range"))
        assert "Same site, several runs" in page.locator("section.compare").inner_text()


def test_a_writer_that_vanishes_is_told_within_seconds(browser: Any, tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys, time; sys.path.insert(0, '.'); from pathlib import Path\n"
        "from tests.viewer.recordings import small_run\n"
        f"writer = small_run(Path({str(tmp_path / 'run')!r}), close=False); print('there', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        try:
            with (
                ViewerServer(Catalog.open([tmp_path / "run"])) as server,
                Visit(browser, server.address) as visit,
            ):
                page = visit.go("#/map")
                page.wait_for_selector(".live")
                process.kill()
                process.wait()
                page.wait_for_selector(".broken-off", timeout=5000)
        finally:
            process.kill()


def test_numbers_that_nobody_wrote_are_not_drawn(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", manifest={}) as writer:
        for step, value in ((0, 2.0), (1, 0.0), (2, 0.0)):
            row = np.array([[value, 3.0 if step == 2 else 0.0]])
            writer.write(
                StepRecord(
                    step, None, None, "train", 0.0, (ScalarBlock(("a:output",), ("l2", "nans"), row),), ()
                )
            )
    shown = Catalog.open([tmp_path / "run"])["run"]
    np.testing.assert_array_equal(shown.grid("l2").values[0], [2.0, 0.0, np.nan])
    np.testing.assert_array_equal(shown.series("a:output", "l2")[1], [2.0, 0.0, np.nan])


def test_evaluations_are_lines_of_their_own_and_no_part_of_the_training(browser: Any, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", manifest={}) as writer:
        for step in range(10):
            for phase in ("train", "eval") if step % 5 == 4 else ("train",):
                factor = 100.0 if phase == "eval" else 1.0
                outputs = ScalarBlock(("a:output",), ("rms",), np.array([[factor * (1 + step)]]))
                loss = ScalarBlock((":value.loss",), ("value",), np.array([[factor]]))
                writer.write(StepRecord(step, None, None, phase, float(step), (outputs, loss), ()))
    with ViewerServer(Catalog.open([tmp_path / "run"])) as server, Visit(browser, server.address) as visit:
        page = visit.go("#/map")
        visit.drawn("rms")
        assert "rms 5\n" in visit.point(0.5, 4.5 / 10).inner_text() + "\n"
        page.select_option("select[aria-label=Phase]", "eval")
        page.wait_for_selector(".heatmap[data-drawn$='2x1']")
        assert "rms 500\n" in visit.point(0.5, 0.25).inner_text() + "\n"
        page.click("nav.views a:text('Scalars')")
        page.wait_for_selector("[data-testid=scalar][data-lines='2'] .uplot canvas")
        assert "run (eval)" in page.locator(".u-legend").inner_text()
