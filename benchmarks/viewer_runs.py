"""The viewer on many runs and on many modules: the table of a thousand, a folded map, ten losses over each other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.viewer.browsing import open_page
from tests.viewer.recordings import small_run

from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import ViewerServer

__all__ = ["folded_map", "many_runs", "overlaid"]

_TEXTS = ("lr < 1e-4 and optimizer = adam", "run-0042", "seed >= 5 or status = recording", "")
_KINDS = 10  # different runs, each copied

# Sets the filter as typing does, and waits for the frame that shows its effect.
_FILTER = """async (text) => {
    const field = document.getElementById("filter");
    const start = performance.now();
    field.value = text;
    field.dispatchEvent(new InputEvent("input", { bubbles: true }));
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    return performance.now() - start;
}"""

_POINT = """async ([selector, x, y]) => {
    const element = document.querySelector(selector);
    const box = element.getBoundingClientRect();
    const where = { clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true };
    const start = performance.now();
    element.dispatchEvent(new PointerEvent("pointermove", where));
    element.dispatchEvent(new MouseEvent("mousemove", where));
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    return performance.now() - start;
}"""


def _places(count: int) -> list[list[float]]:
    places: list[list[float]] = np.random.default_rng(1).uniform(0.3, 0.7, (count, 2)).tolist()
    return places


def many_runs(
    browser: Any, folder: Path, count: int, rounds: int, values: int = 1
) -> tuple[list[float], ...]:
    """Seconds to the first table, seconds until every line is read, milliseconds of a filter."""
    for number in range(count):
        first = folder / f"kind-{number % _KINDS}" / "run-0000"
        if number < _KINDS:
            labels = {"lr": 10.0**-number, "optimizer": ("adam", "sgd")[number % 2], "seed": number}
            small_run(first, labels=labels, values=values)
        else:
            shutil.copytree(first, first.parent / f"run-{number:04d}", copy_function=os.link)
    listed, filled, filtered = [], [], []
    for _ in range(rounds):
        page, errors, _asked = open_page(browser)
        page.set_default_timeout(60_000)
        start = time.perf_counter()
        with ViewerServer(Catalog.open([folder])) as server:
            page.goto(server.address)
            page.wait_for_selector(".runtable td.name")
            listed.append(time.perf_counter() - start)
            page.wait_for_function(
                "() => !document.querySelector('.runs [role=status]').textContent.includes('reading')"
            )
            filled.append(time.perf_counter() - start)
            filtered += [page.evaluate(_FILTER, text) for text in _TEXTS]
            assert errors == [], errors
            page.context.close()
    return listed, filled, filtered


def folded_map(
    browser: Any, folder: Path, steps: int, rounds: int, record: Callable[[Path, int, int], Path]
) -> tuple[list[float], list[float]]:
    """Seconds to the first map of a thousand sites by modules, milliseconds of pointing."""
    path = record(folder / "folded", 1000, steps)
    first, hover = [], []
    for _ in range(rounds):
        page, errors, _asked = open_page(browser)
        page.set_default_timeout(60_000)
        start = time.perf_counter()
        with ViewerServer(Catalog.open([path])) as server:
            page.goto(server.address + "#/map?fold=2")
            page.wait_for_selector(".heatmap[data-drawn$='x50']")
            first.append(time.perf_counter() - start)
            page.wait_for_load_state("networkidle")
            hover += [page.evaluate(_POINT, ["[data-testid=map]", *place]) for place in _places(4)]
            assert errors == [], errors
            page.context.close()
    return first, hover


def overlaid(browser: Any, folder: Path, steps: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds to ten losses over each other, milliseconds of pointing."""
    names = [f"run-{number}" for number in range(10)]
    for number, name in enumerate(names):
        small_run(folder / name, steps=steps, scale=1.0 + 0.1 * number)
    first, hover = [], []
    for _ in range(rounds):
        page, errors, _asked = open_page(browser)
        page.set_default_timeout(60_000)
        start = time.perf_counter()
        with ViewerServer(Catalog.open([folder])) as server:
            page.goto(f"{server.address}#/scalars?with={','.join(names)}")
            page.wait_for_selector("[data-testid=scalar][data-lines='10'] .uplot canvas")
            first.append(time.perf_counter() - start)
            page.wait_for_load_state("networkidle")
            hover += [page.evaluate(_POINT, [".u-over", *place]) for place in _places(4)]
            assert errors == [], errors
            page.context.close()
    return first, hover
