"""``python -m tests.viewer.screenshots``: train, photograph every view, keep what pages show.

Trainings of a small transformer in one folder: one whose first blocks have no residual path, with a dead layer and a
number that becomes infinite near the end; two that go well; one of them again with one factor off by two per cent; and
one on four processes, of which one loses a row of a weight.
Every view at three widths, light and dark.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.viewer.browsing import chromium, open_page
from tests.viewer.ranked import train_ranks
from tests.viewer.recordings import train

from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import ViewerServer

__all__ = ["main"]

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZES = ((1440, 900), (1024, 768), (390, 844))
_MAP = ".heatmap[data-drawn]"
_PICTURE = "[data-testid=picture]"
_OVERLAID = "with=sweep/lr-0.001,sweep/lr-0.003,deep-no-residual"

# Name, address, what to wait for.
VIEWS: list[tuple[str, str, str]] = [
    ("runs", "#/runs", ".runtable .badge"),
    ("scalars", f"#/scalars?{_OVERLAID}&smooth=400", ".uplot canvas"),
    ("map", "#/map?run=deep-no-residual&kind=output", _MAP),
    ("gradients", "#/map?run=deep-no-residual&kind=grad_output", _MAP),
    (
        "difference",
        "#/map?run=sweep/gain&against=sweep/lr-0.003&kind=output",
        _MAP,
    ),
    (
        "site",
        "#/site?run=sweep/lr-0.003&site=blocks.2.mlp.down:output&histograms=ridges",
        "[data-testid=histograms]",
    ),
    ("tensor", "#/site?run=sweep/lr-0.003&site=blocks.4:output&step=80", _PICTURE),
    ("attention", "#/attention?run=sweep/lr-0.003&site=blocks.4.attn:attention&step=64&head=1", _PICTURE),
    ("changes", "#/changes?run=sweep/lr-0.003", "[data-testid=changes]"),
    (
        "compare",
        "#/compare?run=sweep/lr-0.003&a=sweep/lr-0.003&b=sweep/gain&with=sweep/lr-0.003,sweep/gain"
        "&site=blocks.4.mlp.down:output",
        ".verdict",
    ),
    ("findings", "#/findings?run=deep-no-residual", "article.finding"),
    ("ranks", "#/ranks?run=four-ranks&kind=param", "[data-testid=ranksat]"),
]


def record(folder: Path) -> None:
    """Train the runs of the pictures."""
    shape: dict[str, Any] = {"layers": 6, "width": 32, "length": 16}
    train(
        folder / "deep-no-residual", steps=160, plain=3, breaks_at=140, dead=True, rate=1e-3,
        labels={"residual": False}, **shape,
    )  # fmt: skip
    for name, rate, gain in (("lr-0.001", 1e-3, 1.0), ("lr-0.003", 3e-3, 1.0), ("gain", 3e-3, 1.02)):
        labels = {"residual": True, "gain": gain}
        train(folder / "sweep" / name, steps=96, rate=rate, gain=gain, labels=labels, **shape)
    train_ranks(folder / "four-ranks")


def main(folder: Path | None = None, only: Sequence[str] = ()) -> None:
    """Train (or take the runs of an earlier time), serve, photograph all views or ``only`` some."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    pages = [*IMAGES.parent.rglob("*.md"), *IMAGES.parents[1].glob("README*.md")]
    shown = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    with tempfile.TemporaryDirectory() as fresh:
        runs = folder or Path(fresh)
        if not list(runs.glob("*/rank-*")):
            record(runs)
        with ViewerServer(Catalog.open([runs])) as server, chromium() as browser:
            for width, height in SIZES:
                for dark in (False, True):
                    for name, view, wait in (v for v in VIEWS if not only or v[0] in only):
                        picture = _photograph(
                            browser, server.address + view, (width, height), dark, name, wait
                        )
                        path = IMAGES / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                        if path.name in shown:
                            path.write_bytes(_small(picture))
                            print(path.name, path.stat().st_size, flush=True)


def _photograph(browser: Any, address: str, size: tuple[int, int], dark: bool, name: str, wait: str) -> bytes:
    page, errors, _ = open_page(browser, width=size[0], height=size[1], dark=dark)
    page.set_default_timeout(90_000)
    page.goto(address)
    page.wait_for_selector(wait)
    _pose(page, name)
    page.wait_for_timeout(600)
    taken: bytes = page.screenshot()
    assert errors == [], (name, errors)
    page.context.close()
    return taken


def _small(picture: bytes) -> bytes:
    """The same picture with 96 colours: a third of the bytes."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(96, dither=Image.Dither.NONE)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _pose(page: Any, name: str) -> None:
    """What a picture is about goes into the middle of it."""
    if name == "gradients":
        box = page.locator("[data-testid=map]").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + box["height"] * 0.3)
    elif name == "tensor":
        page.evaluate("document.querySelector('.tensor').scrollIntoView({block: 'end'})")
        page.locator(_PICTURE).hover(position={"x": 160, "y": 90})
    elif name == "attention":
        page.locator(_PICTURE).hover(position={"x": 150, "y": 240})
    elif name == "site":
        page.wait_for_selector(".uplot canvas")
        page.evaluate("document.querySelector('[data-testid=histograms]').scrollIntoView({block: 'end'})")
    elif name == "compare":
        page.wait_for_selector(".uplot canvas")
    elif name in ("map", "findings"):
        page.wait_for_selector(".badge")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None, sys.argv[2:])
