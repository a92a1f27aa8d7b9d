"""``python -m tests.viewer.screenshots``: train, then photograph every view into docs/images.

Trainings of a small transformer: one whose first blocks have no residual path, with a dead layer and a number that
becomes infinite near the end; one that goes well; and the same again with one factor off by two per cent.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.viewer.browsing import chromium, open_page
from tests.viewer.recordings import train

from torchtap.viewer.catalog import Catalog
from torchtap.viewer.server import ViewerServer

__all__ = ["main"]

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZES = ((1440, 900), (1024, 768))
_MAP = ".heatmap[data-drawn]"

# Name, address, what to wait for, dark or light.
VIEWS: list[tuple[str, str, str, bool]] = [
    ("heatmap", "#/map?kind=output", _MAP, False),
    ("heatmap-gradients", "#/map?kind=grad_output", _MAP, True),
    ("site", "#/site?site=blocks.2.mlp.down:output", "[data-testid=histograms]", False),
    ("tensor", "#/site?site=blocks.8:output&step=160", "[data-testid=picture]", False),
    (
        "attention",
        "#/attention?run=1&site=blocks.4.attn:attention&step=100&head=1",
        "[data-testid=picture]",
        False,
    ),
    ("compare", "#/compare?a=1&b=2&with=1,2&run=1&site=blocks.8.mlp.down:output", ".verdict", False),
    ("findings", "#/findings", "article.finding", False),
]


def main() -> None:
    """Train, serve, photograph."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shape = {"layers": 12, "width": 32, "length": 16}
        runs = [
            train(
                Path(folder) / "deep-no-residual",
                steps=240,
                plain=3,
                breaks_at=205,
                dead=True,
                rate=1e-3,
                **shape,
            ),
            train(Path(folder) / "deep-residual", steps=120, **shape),
            train(Path(folder) / "deep-residual-gain", steps=120, gain=1.02, **shape),
        ]
        with ViewerServer(Catalog.open(runs)) as server, chromium() as browser:
            for width, height in SIZES:
                for name, view, wait, dark in VIEWS:
                    page, errors, _ = open_page(browser, width=width, height=height, dark=dark)
                    page.set_default_timeout(90_000)
                    page.goto(server.address + view)
                    page.wait_for_selector(wait)
                    page.wait_for_selector("[role=tree] .health")
                    _pose(page, name)
                    page.wait_for_timeout(700)
                    page.screenshot(path=IMAGES / f"{name}-{width}x{height}.png")
                    assert errors == [], (name, errors)
                    page.context.close()
                    print(f"{name}-{width}x{height}.png", flush=True)


def _pose(page: Any, name: str) -> None:
    """What a picture is about goes into the middle of it."""
    if name == "heatmap-gradients":
        box = page.locator("[data-testid=map]").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.35, box["y"] + box["height"] * 0.2)
    elif name == "tensor":
        page.locator(".tensor").scroll_into_view_if_needed()
        page.evaluate("document.querySelector('.tensor').scrollIntoView({block: 'end'})")
        page.locator("[data-testid=picture]").hover(position={"x": 320, "y": 150})
    elif name == "attention":
        page.locator("[data-testid=picture]").hover(position={"x": 200, "y": 320})
    elif name == "compare":
        page.wait_for_selector(".uplot canvas")
    if name not in ("compare", "attention"):
        page.wait_for_selector(".badge")


if __name__ == "__main__":
    main()
