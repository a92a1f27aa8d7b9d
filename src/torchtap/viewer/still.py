"""A report as a picture: through a headless browser where there is one, else drawn by matplotlib."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["find_browser", "write_picture"]

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The path of a Chromium, if there is one."""
    return next((found for name in _BROWSERS if (found := shutil.which(name))), None)


def write_picture(
    report: Path | None, run: str | Path, path: str | Path, *, size: tuple[int, int] = (1440, 900)
) -> str:
    """Write a PNG of ``report`` (a file of `write_report`), else of the run's map; says which way it went."""
    browser = find_browser()
    if browser is not None and report is not None and _photograph(browser, report, Path(path), size):
        return "browser"
    from torchtap.viewer.plot import plot

    plot(run, size=(size[0] / 100, size[1] / 100)).savefig(path, dpi=100)
    return "matplotlib"


def _photograph(browser: str, report: Path, path: Path, size: tuple[int, int]) -> bool:
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            "--headless",
            "--no-sandbox",  # the page is ours and may load nothing
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--lang=en-US",
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            "--virtual-time-budget=8000",
            f"--screenshot={path.resolve()}",
            report.resolve().as_uri(),
        ]
        try:
            subprocess.run(command, capture_output=True, timeout=90, check=True)
        except (OSError, subprocess.SubprocessError):
            return False
    return path.is_file() and path.stat().st_size > 0
