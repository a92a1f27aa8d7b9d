"""A headless Chromium for tests and screenshots, and the notes of what its pages did."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["chromium", "need_browser", "open_page"]

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
    from torchtap.viewer.assets import built

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
    browser: Any, *, width: int = 1440, height: int = 900, dark: bool = False
) -> tuple[Any, list[str], list[str]]:
    """A fresh page, its console errors, and the addresses that it asked for."""
    context = browser.new_context(
        locale="en-US",
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
