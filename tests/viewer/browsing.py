"""A headless Chromium for tests and screenshots, and the notes of what its pages did."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

__all__ = ["Hand", "Visit", "chromium", "need_browser", "open_page", "wait_for_colours"]

_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def _executable() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def need_browser() -> None:
    """Skip without a browser or without the built page; in CI that is a failure."""
    from torchtap.viewer.server import built

    missing = []
    if _executable() is None:
        missing.append("no Chromium on this machine (`make browser` installs one)")
    if not built():
        missing.append("the page is not built (`make frontend`)")
    if missing:
        reason = "; ".join(missing)
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_executable(), args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def open_page(
    browser: Any, *, width: int = 1440, height: int = 900, dark: bool = False, locale: str = "en-US"
) -> tuple[Any, list[str], list[str]]:
    """A fresh page, its console errors, and the addresses that it asked for."""
    context = browser.new_context(
        locale=locale,
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
    )
    page = context.new_page()
    page.set_default_timeout(10_000)
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    return page, errors, asked


class Visit:
    """A page of the viewer that is held to silence on its console and to one host."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.page, self.errors, self.asked = open_page(browser, **options)
        self.address = address

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.page.context.close()
        if kind is None:
            assert self.errors == [], self.errors
            hosts = {urlsplit(address).netloc for address in self.asked if not address.startswith("data:")}
            assert hosts <= {urlsplit(self.address).netloc}

    def go(self, view: str) -> Any:
        self.page.goto(self.address + view)
        return self.page

    def drawn(self, text: str = "") -> str:
        """What the map says it has drawn; waits for ``text`` in it."""
        self.page.wait_for_selector(f".heatmap[data-drawn*='{text}']")
        found: str = self.page.get_attribute(".heatmap", "data-drawn")
        return found

    @property
    def hash(self) -> dict[str, str]:
        """The parameters that the address carries."""
        return dict(parse_qsl(urlsplit(self.page.url).fragment.partition("?")[2]))

    def point(self, row: float, column: float) -> Any:
        """Point into the cells of the map, both from 0 to 1; gives the words that appear."""
        place = self.cell(row, column)
        self.page.mouse.move(*place)
        return self.page.locator(".tip")

    def cell(self, row: float, column: float) -> tuple[float, float]:
        """Where on the screen a place among the cells of the map is."""
        frame = json.loads(self.page.get_attribute(".heatmap", "data-frame"))
        box = self.page.locator("[data-testid=map]").bounding_box()
        x = box["x"] + frame["left"] + column * frame["cellsWidth"]
        return x, box["y"] + frame["top"] + row * frame["cellsHeight"]


def wait_for_colours(page: Any, selector: str, more_than: int) -> None:
    """Wait until a canvas shows more different colours than so many; an error where it never does."""
    page.wait_for_function(
        """([selector, number]) => {
            const canvas = document.querySelector(selector);
            if (!canvas || !canvas.width || !canvas.height) return false;
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const seen = new Set();
            for (let i = 0; i < data.length; i += 4) seen.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
            return seen.size > number;
        }""",
        arg=[selector, more_than],
    )


class Hand:
    """A user's hand: does things on a page and counts them. Typing a text into a field counts as one."""

    def __init__(self, visit: Visit) -> None:
        self.visit, self.page, self.count = visit, visit.page, 0

    def click(self, selector: str, **options: Any) -> None:
        """One click on what ``selector`` finds first."""
        self.page.locator(selector).first.click(**options)
        self.count += 1

    def click_cell(self, row: float, column: float) -> None:
        """One click into the map."""
        self.page.mouse.click(*self.visit.cell(row, column))
        self.count += 1

    def choose(self, label: str, option: str) -> None:
        """Choose from a list."""
        self.page.select_option(f"select[aria-label='{label}']", option)
        self.count += 1

    def type(self, selector: str, text: str, key: str = "Tab") -> None:
        """Write into a field and end with a key."""
        self.page.fill(selector, text)
        self.page.keyboard.press(key)
        self.count += 1

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw from one place of the screen to another."""
        self.page.mouse.move(*start)
        self.page.mouse.down()
        self.page.mouse.move(*end, steps=5)
        self.page.mouse.up()
        self.count += 1

    def save(self, kind: str, box: str = "") -> bytes:
        """Open the menu "save" inside ``box`` and take a file out of it."""
        self.click(f"{box} .take summary")
        with self.page.expect_download() as waiting:
            self.click(f"{box} .take[open] .menu button:text-is('{kind}')")
        content: bytes = waiting.value.path().read_bytes()
        return content
