"""Every view on every state of a run: what the screen says is what the run's own interface gives.

The states are healthy, NaN from the middle on, a gap in the records, a rank missing, and nothing recorded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.viewer.browsing import Visit
from tests.viewer.states import BREAKS, GAP, SITES, STATES, STEPS, write_states
from tests.viewer.wire import unpack

import torchtap as tt
from torchtap.viewer.report import write_report
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import ViewerServer, answer


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_states(tmp_path_factory.mktemp("states") / "runs")


@pytest.fixture(scope="module")
def server(states: Path) -> Iterator[ViewerServer]:
    with ViewerServer(Catalog.open([states])) as started:
        yield started


@pytest.fixture(scope="module")
def visit(browser: Any, server: ViewerServer) -> Iterator[Visit]:
    with Visit(browser, server.address) as opened:
        opened.go("#/runs")
        yield opened


def shown(value: float) -> str:
    """Spell a number as the page does."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "−inf"
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", "−")
    return f"{float(f'{value:.4g}'):g}".replace("-", "−")


def last(states: Path, state: str, site: str, statistic: str | None = None) -> float | None:
    """Return the newest record of a run by its public interface; None if there is none."""
    run = tt.open(states / state, partial=True)
    if not run.sites():
        return None
    values = run.series(site, statistic).values
    return float(values[-1]) if len(values) else None


def legend(page: Any, name: str) -> str:
    """Return what a chart's legend says of a line, once it says anything."""
    row = page.locator(".u-legend .u-series", has=page.locator(f".u-label:text-is('{name}')")).last
    row.wait_for()
    page.wait_for_function(
        "e => !['--', '–'].includes(e.querySelector('.u-value').textContent)", arg=row.element_handle()
    )
    return str(row.locator(".u-value").inner_text())


@pytest.mark.parametrize("state", STATES)
def test_the_table_of_runs(visit: Visit, states: Path, state: str) -> None:
    page = visit.go("#/runs?stats=last,best,min,max")
    page.wait_for_selector("th:has-text('max accuracy')")
    row = page.locator("tbody tr", has=page.locator(f"a:text-is('{state}')")).first
    row.wait_for()
    titles = [text.strip(" ↓↑") for text in page.locator(".runtable th").all_inner_texts()]
    cells = dict(zip(titles, row.locator("td").all_inner_texts(), strict=True))
    run = tt.open(states / state, partial=True)
    assert cells["steps"] == str(len(run.steps()))
    for name in ("loss", "accuracy"):
        if state == "empty":
            assert cells[f"last {name}"] == cells[f"best {name}"] == cells[f"min {name}"] == ""
            continue
        values = run.series(name).values
        finite = values[np.isfinite(values)]
        assert cells[f"last {name}"].strip() == shown(float(values[-1]))
        best = finite.min() if name == "loss" else finite.max()
        assert cells[f"best {name}"] == shown(float(best))
        assert (cells[f"min {name}"], cells[f"max {name}"]) == (
            shown(float(finite.min())),
            shown(float(finite.max())),
        )
    times = run.clock()["time"]
    assert cells["duration"] == (f"{times.max() - times.min():g} s" if len(times) else "")


@pytest.mark.parametrize("shape", ["scatter", "parallel"])
def test_points_and_lines_of_a_sweep(visit: Visit, states: Path, shape: str) -> None:
    page = visit.go(f"#/runs?show={shape}&sx=lr&sy=loss")
    page.wait_for_selector(f"svg.{shape} [data-run=healthy]")
    for state in STATES:
        mark = page.locator(f"svg.{shape} [data-run={state}]")
        value = last(states, state, "loss")
        if value is None:
            assert mark.count() == (0 if shape == "scatter" else 1)
        else:
            assert float(mark.get_attribute("data-value")) == pytest.approx(value, nan_ok=True)
    assert page.locator(f"svg.{shape} text.bad").text_content() == "NaN or inf"


def test_a_layer_over_the_sweep(visit: Visit, states: Path) -> None:
    page = visit.go("#/runs?show=layers&sx=lr&site=trunk:output&statistic=rms&step=20")
    page.wait_for_selector("svg.scatter [data-run=ranks]")
    for state, step in (("healthy", 20), ("nan", 20), ("gaps", GAP[0]), ("ranks", 20)):
        series = tt.open(states / state).series("trunk:output", "rms")
        expected = series.values[list(series.steps).index(step)]
        assert float(page.get_attribute(f"svg.scatter [data-run={state}]", "data-value")) == expected
    visit.go("#/runs?show=layers&sx=lr&site=trunk:output&statistic=rms")
    page.wait_for_selector("svg.scatter [data-run=nan][data-value=NaN]")


@pytest.mark.parametrize("state", STATES)
def test_scalars(visit: Visit, states: Path, state: str) -> None:
    page = visit.go(f"#/scalars?run={state}&value=:value.loss")
    value = last(states, state, "loss")
    if value is None:
        page.wait_for_selector("text=No values were logged.")
        return
    assert legend(page, state) == shown(value)
    chart = page.locator(".chart")
    assert chart.get_attribute("data-gaps") == (f"[[{GAP[0]},{GAP[1]}]]" if state == "gaps" else "[]")
    assert chart.get_attribute("data-broken") == (f"[[{BREAKS},{STEPS - 1}]]" if state == "nan" else "[]")


def test_smoothed_scalars_say_both_numbers_and_name_the_run_of_a_nan(visit: Visit, states: Path) -> None:
    page = visit.go("#/scalars?with=healthy,nan,gaps&value=:value.loss&smooth=600")
    values = tt.open(states / "healthy").series("loss").values
    total = share = 0.0
    for value in values:
        total, share = 0.6 * total + 0.4 * value, 0.6 * share + 0.4
    assert legend(page, "healthy") == f"{shown(values[-1])}, smoothed {shown(total / share)}"
    assert legend(page, "nan") == "NaN, smoothed –"
    assert page.get_attribute(".chart", "data-broken") == f'[[{BREAKS},{STEPS - 1},"nan"]]'


@pytest.mark.parametrize("state", STATES)
def test_the_map(visit: Visit, states: Path, state: str) -> None:
    page = visit.go(f"#/map?run={state}&statistic=rms")
    if state == "empty":
        page.wait_for_selector("text=This run holds no statistics yet.")
        return
    page.wait_for_selector(".heatmap[data-names='stem | trunk | head']")
    value = last(states, state, "trunk:output", "rms")
    assert value is not None
    if state == "nan":
        page.wait_for_selector(".badge")  # findings are there, and with them the counts of NaN
        page.wait_for_timeout(200)
    words = visit.point(0.5, 0.99).inner_text()
    assert f"step {STEPS - 1}" in words
    assert (
        ("no finite value" in words and "8 NaN or inf" in words)
        if math.isnan(value)
        else f"rms {shown(value)}" in words
    )
    if state == "gaps":
        assert "not recorded" in visit.point(0.5, 14 / 26).inner_text()


@pytest.mark.parametrize("state", STATES)
def test_a_site(visit: Visit, states: Path, state: str) -> None:
    page = visit.go(f"#/site?run={state}&site=trunk:output")
    if state == "empty":
        page.wait_for_selector("text=This run has no site called")
        return
    for statistic in ("rms", "std"):
        value = last(states, state, "trunk:output", statistic)
        assert value is not None
        assert legend(page, statistic) == shown(value)
    if state == "gaps":
        assert page.locator(".chart").first.get_attribute("data-gaps") == f"[[{GAP[0]},{GAP[1]}]]"


@pytest.mark.parametrize("state", STATES)
def test_changes(visit: Visit, states: Path, state: str) -> None:
    step = 20
    page = visit.go(f"#/changes?run={state}&statistic=rms&after={STEPS - 1 if state != 'gaps' else step}")
    if state == "empty":
        page.wait_for_selector("section.changes")
        assert page.locator("table").count() == 0
        return
    row = page.locator("[data-testid=changes] tbody tr", has=page.locator("a:text-is('trunk:output')"))
    row.wait_for()
    cells = row.locator("td").all_inner_texts()
    series = tt.open(states / state).series("trunk:output", "rms")
    at = len(series.steps) - 1 if state != "gaps" else list(series.steps).index(GAP[0])
    assert cells[1] == shown(series.values[0])
    expected = shown(series.values[at]) + (f" (step {GAP[0]})" if state == "gaps" else "")
    assert cells[2] == expected
    assert cells[3] == shown(series.values[at] - series.values[0])


@pytest.mark.parametrize("state", STATES)
def test_compare(visit: Visit, states: Path, state: str) -> None:
    other = "gaps" if state == "healthy" else "healthy"
    page = visit.go(
        f"#/compare?run={other}&a={other}&b=nan&with={state},{other}&site=trunk:output&statistic=rms"
    )
    page.wait_for_selector("section.compare .panel")
    value = last(states, state, "trunk:output", "rms")
    if value is None:
        page.wait_for_selector(f"text=Not recorded: {state}")
        return
    assert legend(page, state) == shown(value)
    if state == "nan":
        assert page.locator(".chart").last.get_attribute("data-broken") == f'[[{BREAKS},{STEPS - 1},"nan"]]'


@pytest.mark.parametrize("state", STATES)
def test_findings(visit: Visit, states: Path, state: str) -> None:
    page = visit.go(f"#/findings?run={state}")
    page.wait_for_selector("section.findings")
    page.wait_for_function("() => !document.querySelector('section.findings').textContent.includes('…')")
    found = tt.diagnose(states / state)
    assert page.locator("section.findings .finding").count() == len(found)
    for finding in found:
        assert finding.message in page.locator("section.findings").inner_text()


@pytest.mark.parametrize("state", STATES)
def test_ranks(visit: Visit, states: Path, state: str) -> None:
    page = visit.go(f"#/ranks?run={state}&statistic=rms")
    if state != "ranks":
        page.wait_for_selector("text=One rank wrote this run.")
        return
    page.wait_for_selector("[data-testid=ranksat]")
    assert "rank 2 of the launch recorded nothing" in page.locator("[data-testid=absent]").inner_text()
    verdict = page.locator("[data-testid=verdict]").inner_text()
    assert "agree" not in verdict
    assert "3 sites NaN or inf, first stem:output on rank 3" in verdict
    row = page.locator("[data-testid=ranksat] tbody tr", has=page.locator("a:text-is('trunk:output')"))
    cells = row.locator("td").all_inner_texts()
    middle = tt.open(states / "ranks").rank(1).series("trunk:output", "rms").values[-1]
    assert cells[2:] == [shown(middle), "rank 3: NaN or inf", "NaN"]
    assert page.locator(".labelled .rows span").all_inner_texts() == list(SITES[:3])
    assert page.locator(".labelled .columns span").all_inner_texts() == ["0", "1", "3"]
    page = visit.go(f"#/ranks?run=ranks&statistic=rms&step={BREAKS - 1}")
    page.wait_for_selector(f"text=At step {BREAKS - 1}, ranks that hold the same agree at 3 sites")


@pytest.mark.parametrize("state", STATES)
def test_attention_of_a_run_without_any(visit: Visit, state: str) -> None:
    page = visit.go(f"#/attention?run={state}")
    page.wait_for_selector("section")
    page.wait_for_timeout(100)
    assert not re.search(r"undefined|\[object|NaN", page.locator("main").inner_text())


def test_a_report_of_all_states_has_the_findings_of_each(browser: Any, states: Path, tmp_path: Path) -> None:
    report = write_report([states / state for state in STATES], tmp_path / "all.html")
    with Visit(browser, report.path.as_uri()) as visit:
        page = visit.go("#/runs")
        row = page.locator("tbody tr", has=page.locator("a:text-is('nan')")).first
        row.wait_for()
        titles = [text.strip(" ↓↑") for text in page.locator(".runtable th").all_inner_texts()]
        cells = dict(zip(titles, row.locator("td").all_inner_texts(), strict=True))
        assert cells["findings"].split() == ["1", "error"]
        assert cells["last loss"].strip() == "NaN"
        page.goto(report.path.as_uri() + "#/scalars?run=nan&value=:value.loss")
        assert legend(page, "nan") == "NaN"


def test_the_difference_of_two_groups_on_the_map(visit: Visit, states: Path, tmp_path: Path) -> None:
    page = visit.go("#/map?run=healthy&statistic=rms&group=state&of=gaps&minus=healthy&change=difference")
    page.wait_for_selector("[data-testid=groups]")
    assert (
        "1 run with state gaps minus that of 1 run with state healthy"
        in page.locator("[data-testid=groups]").inner_text()
    )
    catalog = Catalog.open([states])
    asked = {
        "run": "healthy",
        "statistic": "rms",
        "kind": "output",
        "of": "healthy,gaps",
        "minus": "nan,healthy",
    }
    facts, arrays = unpack(answer(catalog, "map", asked))
    assert facts["sites"] == list(SITES[:3])
    steps = tt.open(states / "gaps").steps()
    broken = arrays["steps"] >= BREAKS
    inside = np.isin(arrays["steps"], steps)
    assert np.isnan(arrays["low"][:, broken]).all()  # a mean with a NaN in it is NaN
    np.testing.assert_array_equal(arrays["low"][:, inside & ~broken], 0)


@pytest.mark.parametrize("dark", [False, True])
def test_twenty_lines_differ_in_colour_or_dashes_also_for_colour_blind_eyes(
    browser: Any, tmp_path: Path, dark: bool
) -> None:
    from tests.viewer.recordings import small_run

    for number in range(20):
        small_run(tmp_path / "runs" / f"run-{number:02d}", steps=3)
    names = ",".join(f"run-{number:02d}" for number in range(20))
    with (
        ViewerServer(Catalog.open([tmp_path / "runs"])) as started,
        Visit(browser, started.address, dark=dark) as visit,
    ):
        page = visit.go(f"#/scalars?with={names}")
        page.wait_for_selector(".chip[aria-pressed=true] >> nth=19")
        drawn = page.evaluate(
            """() => [...document.querySelectorAll(".chip[aria-pressed=true] svg line")].map((line) => {
                const style = getComputedStyle(line);
                return [style.stroke, style.strokeDasharray];
            })"""
        )
    assert len(drawn) == 20
    strokes = [(_lab(colour), dash) for colour, dash in drawn]
    for kind in range(4):
        for first, (a, dash) in enumerate(strokes):
            for b, other in strokes[:first]:
                assert dash != other or float(np.linalg.norm(a[kind] - b[kind])) > 22.0


def _lab(text: str) -> list[np.ndarray[Any, Any]]:
    """Return a colour in CIELAB as usual eyes see it, and as those without one kind of cone do (Viénot 1999)."""
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", text)[:3])
    linear = np.array(
        [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    )
    blind = [
        np.eye(3),
        np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
        np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
        np.array([[1, 0.15236, -0.15236], [0, 0.86717, 0.13283], [0, 0.86717, 0.13283]]),
    ]
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    found = []
    for matrix in blind:
        xyz = to_xyz @ np.clip(matrix @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
        x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        found.append(np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)]))
    return found
