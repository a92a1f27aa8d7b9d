"""The report's file, the page's parts, and the commands; the browser's view of it is in test_page."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.optional import need

from torchtap.cli.report import command as report_command
from torchtap.cli.view import command as view_command
from torchtap.errors import MissingExtraError
from torchtap.viewer import server as assets
from torchtap.viewer.report import find_browser, write_picture, write_report
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import answer

ROOT = Path(__file__).parents[2]
needs_page = pytest.mark.skipif(not assets.built(), reason="the page is not built (`make frontend`)")


@needs_page
def test_a_report_holds_what_the_viewer_would_answer(run_folder: Path, tmp_path: Path) -> None:
    report = write_report([run_folder], tmp_path / "report.html", sites=["head:output"])
    text = report.path.read_text()
    packed = re.search(r'<script id="torchtap-archive" type="text/plain">([^<]*)</script>', text)
    assert packed is not None
    body = gzip.decompress(base64.b64decode(packed[1]))
    (length,) = struct.unpack_from("<I", body)
    index = {key: (at, size) for key, at, size in json.loads(body[4 : 4 + length])}
    at, size = index["map?kind=output&run=first&statistic=rms"]
    expected = answer(
        Catalog.open([run_folder]),
        "map",
        {"kind": "output", "statistic": "rms", "columns": "480", "rows": "800"},
    )
    assert body[4 + length + at : 4 + length + at + size] == expected
    assert "series?run=first&site=head%3Aoutput" in index
    assert "series?run=first&site=norm%3Aoutput" not in index
    assert report.sites == ("head:output",)
    assert report.size < 3_000_000


@needs_page
def test_a_report_allows_only_its_own_script_and_nothing_from_elsewhere(
    run_folder: Path, tmp_path: Path
) -> None:
    text = write_report([run_folder], tmp_path / "r.html", sites=["head:output"]).path.read_text()
    script = text.rpartition('<script type="module">')[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none'")
    assert "unsafe" not in policy[1]


@needs_page
def test_the_page_is_small_and_carries_the_licences_of_what_is_in_it() -> None:
    sizes = {name: len(assets.asset(name)) for name in assets.FILES}
    assert sum(sizes.values()) < 400_000
    licences = assets.asset("licenses.txt").decode()
    assert "preact" in licences
    assert "uplot" in licences
    assert "MIT" in licences


def test_without_the_built_page_the_viewer_says_what_to_do(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "built", lambda: False)
    assets.asset.cache_clear()
    try:
        with pytest.raises(MissingExtraError, match="make frontend"):
            assets.asset("index.html")
        shown = CliRunner().invoke(view_command, [str(run_folder), "--no-browser"])
        assert shown.exit_code != 0
        assert "make frontend" in str(shown.exception)  # printed by the entry point
    finally:
        assets.asset.cache_clear()


def test_the_lock_file_names_no_host() -> None:
    lock = (ROOT / "frontend" / "package-lock.json").read_text()
    assert not re.search(r"https?://|\.(org|com|net|io)\b", lock)
    assert '"integrity": "sha512-' in lock


def test_a_figure_stands_in_where_there_is_no_browser(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("matplotlib")
    monkeypatch.setattr("torchtap.viewer.report.find_browser", lambda: None)
    assert write_picture(None, run_folder, tmp_path / "map.png") == "matplotlib"
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@needs_page
@pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")
def test_the_command_writes_a_report_and_its_picture(run_folder: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "out.html", tmp_path / "out.png"
    shown = CliRunner().invoke(
        report_command, [str(run_folder), "-o", str(out), "--png", str(png), "--site", "head:*"]
    )
    assert shown.exit_code == 0, shown.output
    assert "drawn by browser" in shown.output
    assert png.read_bytes().startswith(b"\x89PNG")


@needs_page
def test_view_prints_its_address_first_and_serves_it(run_folder: Path) -> None:
    import urllib.request

    command = [sys.executable, "-m", "torchtap.cli", "view", str(run_folder), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
            with urllib.request.urlopen(f"{address}api/runs", timeout=20) as reply:
                assert json.load(reply)["runs"][0]["name"] == "first"
        finally:
            process.terminate()


@needs_page
@pytest.mark.parametrize("name", ["index.html", "app.js", "app.css"])
def test_the_page_names_no_other_host(name: str) -> None:
    text = assets.asset(name).decode()
    hosts = set(re.findall(r"https?://([\w.-]+)", text))
    assert hosts <= {"www.w3.org"}  # names of SVG's and MathML's namespaces, never fetched
