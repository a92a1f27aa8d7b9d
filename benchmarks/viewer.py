"""The viewer on 2,000 sites by 10,000 steps with all twelve statistics (1.9 GB), on 1,000 runs, on 1,000 sites folded
by module and on ten runs overlaid, measured in headless Chromium.

The first map counts from the start of the server's work (opening the run) to the picture on the screen, with a fresh
server each time. Interactions are measured inside the page: from the event to the frame that shows its effect; those
that ask the server wait for the new picture. Files are in the page cache. Medians with quartiles.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.viewer.browsing import chromium, open_page

from benchmarks.timing import quartiles
from benchmarks.viewer_runs import folded_map, many_runs, overlaid
from torchtap.store.record import ScalarBlock, StepRecord
from torchtap.store.write.writer import RunWriter
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import FILES, ViewerServer, asset

__all__ = ["record", "run"]

_STATISTICS = ("count", "mean", "std", "min", "max", "absmax", "l1", "l2", "rms", "zeros", "nans", "infs")
_SITES, _STEPS = 2000, 10_000
_SPIKE = (1234, 6543)


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Rows for the table."""
    rounds = 3 if quick else 7
    with tempfile.TemporaryDirectory() as folder:
        path = record(Path(folder) / "run", _SITES, _STEPS // 10 if quick else _STEPS)
        with chromium() as browser:
            first, work = zip(*(_first_map(browser, path) for _ in range(rounds)), strict=True)
            hover, zoom, statistic, again, site, spike = _interactions(browser, path, rounds)
            listed, filled, filtered = many_runs(
                browser, Path(folder) / "many", 100 if quick else 1000, rounds
            )
            wide, wide_filled, wide_filtered = many_runs(browser, Path(folder) / "wide", 200, rounds, 50)
            folded, folded_hover = folded_map(browser, Path(folder), 500 if quick else 5000, rounds, record)
            drawn, pointed = overlaid(browser, Path(folder) / "ten", 1000 if quick else 10_000, rounds)
    bundle = sum(len(asset(name)) for name in FILES) / 1e3
    return [
        _row("first map, from opening the run", list(first), "s", 2.0),
        _row("of that, the server's processor time", list(work), "s", 2.0),
        _row("pointing at a cell: cross-hair, tip and both strips", hover, "ms", 50.0),
        _row("zoom into steps: new picture from the server", zoom, "ms", 500.0),
        _row("another statistic, read for the first time", statistic, "ms", 2000.0),
        _row("a statistic that was shown before", again, "ms", 500.0),
        _row("opening a site: two charts of 10,000 steps", site, "ms", 1000.0),
        _row("1,000 runs: the table, from opening the folder", listed, "s", 2.0),
        _row("200 runs x 50 logged values: the table", wide, "s", 1.0),
        _row("200 runs x 50 logged values: every line read", wide_filled, "s", 3.0),
        _row("200 runs x 50 logged values: a filter", wide_filtered, "ms", 100.0),
        _row("1,000 runs: every line read", filled, "s", 20.0),
        _row("1,000 runs: filter by an expression", filtered, "ms", 50.0),
        _row("1,000 sites by 5,000 steps, folded by module: first map", folded, "s", 2.0),
        _row("the same: pointing at a cell", folded_hover, "ms", 50.0),
        _row("scalars of ten runs of 10,000 steps overlaid: first picture", drawn, "s", 2.0),
        _row("the same: pointing at a step", pointed, "ms", 50.0),
        {
            "case": "a spike at one step of one site is in the map",
            "measured": "yes" if spike else "no",
            "bar": "yes",
            "holds": spike,
        },
        {
            "case": "the page, all files",
            "measured": f"{bundle:.0f} kB",
            "bar": "< 300 kB",
            "holds": bundle < 300,
        },
    ]


def _row(case: str, values: list[float], unit: str, bar: float) -> dict[str, Any]:
    low, middle, high = quartiles(values)
    digits = 2 if unit == "s" else 0
    return {
        "case": case,
        "measured": f"{middle:.{digits}f} {unit} [{low:.{digits}f}–{high:.{digits}f}]",
        "bar": f"< {bar:g} {unit}",
        "holds": middle < bar,
    }


def record(folder: Path, sites: int, steps: int) -> Path:
    """A made-up training: sizes that fade with depth and recover, noise, one spike."""
    names = tuple(f"blocks.{i // 20}.part{i % 20}:output" for i in range(sites))
    noise = np.random.default_rng(0)
    depth = np.linspace(0, 1, sites)[:, None]
    manifest = {"sites": [{"name": name, "class": "Linear", "shape": [8, 512]} for name in names]}
    with RunWriter(folder, manifest=manifest) as writer:
        for step in range(steps):
            values = np.exp(-3 * depth * (1 - step / steps)) * (1 + 0.02 * noise.standard_normal((sites, 12)))
            values[:, 9:] = 0
            if step == _SPIKE[1] % steps and sites > _SPIKE[0]:
                values[_SPIKE[0], :9] = 900.0
            block = ScalarBlock(names, _STATISTICS, values)
            writer.write(StepRecord(step, None, None, "train", float(step), (block,), ()))
    return folder


def _first_map(browser: Any, path: Path) -> tuple[float, float]:
    page, _, _ = open_page(browser)
    page.set_default_timeout(60_000)
    start, used = time.perf_counter(), time.process_time()
    with ViewerServer(Catalog.open([path])) as server:
        page.goto(server.address)
        page.wait_for_selector(".heatmap[data-drawn]")
        spent, used = time.perf_counter() - start, time.process_time() - used
        page.wait_for_load_state("networkidle")  # the findings, which would slow the next round
        page.context.close()
    return spent, used


# Waits until the page's map says something else than before, then for the frame after that.
_NEXT_PICTURE = """async ([name, act]) => {
    const map = document.querySelector(".heatmap");
    const before = map.dataset[name];
    const start = performance.now();
    const changed = new Promise(done => {
        const watcher = new MutationObserver(() => {
            if (map.dataset[name] !== before) { watcher.disconnect(); requestAnimationFrame(() => done()); }
        });
        watcher.observe(map, { attributes: true });
    });
    if (act.hash) { history.replaceState(null, "", act.hash); dispatchEvent(new HashChangeEvent("hashchange")); }
    await changed;
    return performance.now() - start;
}"""

_POINT = """async ([x, y]) => {
    const canvas = document.querySelector("[data-testid=map]");
    const box = canvas.getBoundingClientRect();
    const start = performance.now();
    const where = { clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true };
    canvas.dispatchEvent(new PointerEvent("pointermove", where));
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    return performance.now() - start;
}"""

_OPEN_SITE = """async (hash) => {
    const start = performance.now();
    location.hash = hash;
    while (document.querySelectorAll(".uplot canvas").length < 2) await new Promise(requestAnimationFrame);
    return performance.now() - start;
}"""


def _interactions(browser: Any, path: Path, rounds: int) -> tuple[list[float], ...] | Any:
    with ViewerServer(Catalog.open([path])) as server:
        page, errors, _ = open_page(browser)
        page.set_default_timeout(60_000)
        page.goto(server.address)
        page.wait_for_selector(".heatmap[data-drawn]")
        page.wait_for_timeout(3000)  # findings are read meanwhile
        steps = len(Catalog.open([path])["run"].run.steps())

        def picture(name: str, hash_: str) -> float:
            spent: float = page.evaluate(_NEXT_PICTURE, [name, {"hash": hash_}])
            return spent

        places = np.random.default_rng(1).uniform(0.3, 0.7, (rounds * 3, 2)).tolist()
        hover = [page.evaluate(_POINT, place) for place in places]
        shares = [(0.1 * i, 0.1 * i + 0.3) for i in range(rounds)]
        zoom = [picture("range", f"#/map?from={int(a * steps)}&to={int(b * steps)}") for a, b in shares]
        names = ("std", "absmax", "l2", "max", "l1", "min", "mean")[:rounds]
        fresh = [picture("drawn", f"#/map?statistic={name}") for name in names]
        again = [picture("drawn", f"#/map?statistic={name}") for name in names[:-1]]
        spike = _spike_is_there(server)
        site = []
        for number in range(rounds):
            site.append(page.evaluate(_OPEN_SITE, f"#/site?site=blocks.{number}.part3:output"))
            page.evaluate("location.hash = '#/map'")
            page.wait_for_selector(".heatmap[data-drawn]")
        assert errors == [], errors
        page.context.close()
    return hover, zoom, fresh, again, site, spike


def _spike_is_there(server: ViewerServer) -> bool:
    import urllib.request

    from torchtap.viewer.arrays import unpack

    address = f"{server.address}api/map?run=run&statistic=rms&kind=output&rows=700&columns=960"
    with urllib.request.urlopen(address) as reply:
        _, arrays = unpack(reply.read())
    greatest: Callable[..., Any] = arrays.get("high", arrays["low"]).max
    return float(greatest()) == 900.0
