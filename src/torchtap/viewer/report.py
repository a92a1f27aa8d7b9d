"""Write a report: one HTML file with the page and its answers, for mail and CI artefacts; or a PNG of it.

The file is the viewer's own page with an archive of answers inside. Its content policy forbids requests to any server.
It guarantees: the report shows what the viewer would show; its size is bounded, and the result names the sites that
did not fit.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final
from urllib.parse import urlencode

from torchtap.errors import TorchtapError
from torchtap.progress import Listener, showing, tracked
from torchtap.sanitize import browser_text, in_html
from torchtap.spi import Name
from torchtap.viewer.figures import matching_sites
from torchtap.viewer.open_run import OpenRun, Refused
from torchtap.viewer.run_index import Catalog, phases_of
from torchtap.viewer.server import answer, asset

__all__ = ["Report", "find_browser", "write_picture", "write_report"]


_BUDGET = 10 << 20  # bytes of answers before compression
_COLUMNS = 480
_ROWS = 800
_POINTS = 1500
_STEPS = 12  # of a tensor
_COMPARED = 4  # runs that are compared with the first


@final
@dataclass(frozen=True, slots=True)
class Report:
    """A written report: its path, its size, and which of the wanted sites it contains."""

    path: Path
    size: int
    sites: tuple[str, ...]
    left_out: tuple[str, ...]


@final
class _Archive:
    """Answers by question, as the page looks them up."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._entries: dict[str, bytes] = {}
        self.size = 0

    def add(
        self, question: str, parameters: dict[str, str | int], sizes: dict[str, str | int] | None = None
    ) -> None:
        """Ask and keep. ``sizes`` say how much is wanted and are no part of the key."""
        asked = {name: str(value) for name, value in {**parameters, **(sizes or {})}.items()}
        try:
            body = answer(self._catalog, question, asked)
        except (Refused, TorchtapError):
            return  # the page shows that this is not part of the report
        key = f"{question}?{urlencode(sorted((n, str(v)) for n, v in parameters.items()))}"
        self.size += len(body) - len(self._entries.get(key, b""))
        self._entries[key] = body

    def encode(self) -> str:
        """The archive as text: an index, the answers, gzip, base64."""
        index, parts, offset = [], [], 0
        for key, body in self._entries.items():
            padding = b"\0" * (-len(body) % 8)
            index.append([key, offset, len(body)])
            parts += [body, padding]
            offset += len(body) + len(padding)
        head = json.dumps(index).encode("ascii")
        head += b" " * (-(len(head) + 4) % 8)
        packed = gzip.compress(b"".join([struct.pack("<I", len(head)), head, *parts]), 6, mtime=0)
        return base64.b64encode(packed).decode("ascii")


def write_report(
    runs: Sequence[str | Path],
    path: str | Path,
    *,
    sites: Sequence[str] = (),
    title: str | None = None,
    rank: int | None = None,
    progress: bool | Listener | None = None,
) -> Report:
    """Write a report about ``runs`` to ``path``.

    ``sites`` are names or patterns of those that get a page of their own; without any, those that something
    was found at come first, then all others as far as there is room. ``rank`` shows one rank's recording alone. With
    ``progress=True`` a bar is shown.
    """
    with showing(progress):
        return _write_report(runs, Path(path), sites, title, rank)


def _write_report(
    runs: Sequence[str | Path], target: Path, sites: Sequence[str], title: str | None, rank: int | None
) -> Report:
    catalog = Catalog.open(runs, rank=rank)
    while catalog.survey():
        pass
    archive = _Archive(catalog)
    inside: list[str] = []
    left_out: list[str] = []
    names = catalog.names()
    for name in names:
        _add_logged(archive, catalog[name])  # first: they are small, and everybody looks at them
    for name in tracked(names, "drawing maps"):
        _add_overview(archive, catalog[name])
    archive.add("runs", {})  # after the findings, so that the table has them
    for name in names[1:_COMPARED]:
        archive.add("comparison", {"a": browser_text(names[0]), "b": browser_text(name)})
    for name in names:
        shown = catalog[name]
        for site in tracked(_wanted(shown, sites), "drawing sites"):
            if archive.size > _BUDGET:
                left_out.append(site)
                continue
            _add_site(archive, shown, site)
            inside.append(site)
    page = _page(archive.encode(), title or ", ".join(names[:6]))
    target.write_bytes(page)
    return Report(target, len(page), tuple(inside), tuple(left_out))


def _add_logged(archive: _Archive, shown: OpenRun) -> None:
    for site in shown.sites:
        if "value" in shown.statistics[site]:
            its: dict[str, str | int] = {"run": browser_text(shown.name), "site": browser_text(site)}
            archive.add("scalars", its, {"points": _POINTS})
            if len(phases := phases_of(shown.run)) > 1:
                for phase in phases:
                    archive.add("scalars", {**its, "phase": phase}, {"points": _POINTS})
            archive.add("series", its, {"statistics": "value", "points": _POINTS})


def _add_overview(archive: _Archive, shown: OpenRun) -> None:
    for question in ("about", "findings", "coverage"):
        archive.add(question, {"run": browser_text(shown.name)})
    maps = _maps(shown)
    sizes: dict[str, str | int] = {"columns": _COLUMNS, "rows": _ROWS}
    # The maps that tell most come first, so that a large run keeps them.
    for tier in (("rms", "nonfinite"), ("std", "absmax", "zeros", "l2", "grad/weight"), None):
        for kind, name in maps:
            if (tier is None or name in tier) and archive.size < _BUDGET // 2:
                asked: dict[str, str | int] = {
                    "run": browser_text(shown.name),
                    "statistic": browser_text(name),
                    "kind": browser_text(kind),
                }
                archive.add("map", asked, sizes)


def _maps(shown: OpenRun) -> list[tuple[str, str]]:
    """The maps that the page can draw of a run: a kind, and a statistic that is recorded of it or follows."""
    statistics: dict[str, dict[str, None]] = {}
    for site, held in shown.statistics.items():
        statistics.setdefault(Name.read(site).kind, {}).update(dict.fromkeys(held))
    for kind, names in statistics.items():
        if "nans" in names:
            names["nonfinite"] = None
        if kind == "param_grad":
            names["grad/weight"] = None
    return [(kind, name) for kind, names in statistics.items() for name in names]


def _wanted(shown: OpenRun, patterns: Sequence[str]) -> list[str]:
    if patterns:
        return matching_sites(shown.run, patterns)
    found = [finding.site for finding in shown.findings()]
    with_tensors = list(dict.fromkeys(reference.site for reference in shown.run.tensors()))
    return list(dict.fromkeys([*found, *with_tensors, *shown.sites]))


def _add_site(archive: _Archive, shown: OpenRun, site: str) -> None:
    its: dict[str, str | int] = {"run": browser_text(shown.name), "site": browser_text(site)}
    if statistics := [browser_text(name) for name in shown.statistics.get(site, ())]:
        archive.add("series", its, {"statistics": ",".join(statistics), "points": _POINTS})
    references = shown.run.tensors(site)
    if not references:
        return
    archive.add("tensors", its)
    archive.add("span", {**its, "field": "value"})
    if any("histogram" in reference.reduction for reference in references):
        archive.add("histograms", its)
    for parameters in _slices(shown, site):
        if archive.size > _BUDGET:
            return
        archive.add("slice", {**its, **parameters})
        archive.add("tokens", {"run": browser_text(shown.name), "step": parameters["step"]})
    if Name.read(site).kind == "attention":
        archive.add("entropy", its)


def _slices(shown: OpenRun, site: str) -> Iterator[dict[str, str | int]]:
    """Return the slices that the page shows at first, at the last few steps."""
    kept = [r for r in shown.run.tensors(site) if "histogram" not in r.reduction and len(r.shape) <= 16]
    for reference in kept[-_STEPS:]:
        dimensions = max(2, len(reference.shape))
        base: dict[str, str | int] = {"step": reference.step, "field": browser_text(reference.field)}
        place = {"index": ",".join("0" * len(reference.shape))} if len(reference.shape) > 2 else {}
        yield {**base, "down": dimensions - 2, "across": dimensions - 1, **place}
        if Name.read(site).kind == "attention" and len(reference.shape) >= 3:
            place = place if len(reference.shape) > 3 else {}
            yield {**base, "stack": len(reference.shape) - 3, **place}


def _page(archive: str, title: str) -> bytes:
    # A script or style inside HTML ends at its closing tag; torchtap's own hold none, and a build that did
    # would be noticed here and not by a reader.
    script, style = asset("app.js").decode(), asset("app.css").decode()
    if "</script" in script.lower() or "</style" in style.lower():
        raise ValueError("the built page cannot be put into one file: it holds a closing tag")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{in_html(title)} · torchtap</title><style>{style}</style></head>"
        f'<body><div id="app"></div><script id="torchtap-archive" type="text/plain">{archive}</script>'
        f'<script type="module">{script}</script></body></html>'
    ).encode()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The path of a Chromium, if there is one."""
    return next((found for name in _BROWSERS if (found := shutil.which(name))), None)


def write_picture(
    report: Path | None, run: str | Path, path: str | Path, *, size: tuple[int, int] = (1440, 900)
) -> str:
    """Write a PNG of ``report`` (a file of `write_report`), else of the run's map. Return "browser" or "matplotlib"."""
    browser = find_browser()
    if browser is not None and report is not None and _photograph(browser, report, Path(path), size):
        return "browser"
    from torchtap.viewer.figures import plot

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
