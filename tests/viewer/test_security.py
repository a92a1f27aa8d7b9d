"""Who gets an answer from the viewer, and what a hostile run can do to it: nothing."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.optional import need

from torchtap.store.record import ScalarBlock, StepRecord, TensorItem
from torchtap.store.write.writer import RunWriter
from torchtap.viewer import server as assets
from torchtap.viewer.run_index import Catalog
from torchtap.viewer.server import CONTENT_POLICY, Policy, ViewerServer, application

testclient = need("starlette.testclient")

SCRIPT = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def client_of(*folders: Path, host: str = "127.0.0.1", base: str = "http://127.0.0.1:8000") -> Any:
    policy = Policy.of(host)
    client = testclient.TestClient(application(Catalog.open(folders), policy), base_url=base)
    client.policy = policy
    return client


@pytest.fixture(scope="module")
def client(run_folder: Path) -> Any:
    return client_of(run_folder)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8000", "", "[::2]"])
def test_a_foreign_host_name_is_refused(client: Any, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:1", "[::1]:99"])
def test_every_name_of_this_machine_alone_is_answered(client: Any, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:9", "http://localhost:8000"]
)
def test_a_foreign_origin_is_refused(client: Any, origin: str) -> None:
    assert client.get("/api/runs", headers={"origin": origin}).status_code == 403


def test_the_page_s_own_origin_is_answered(client: Any) -> None:
    assert client.get("/api/runs", headers={"origin": "http://127.0.0.1:8000"}).status_code == 200


def test_a_cross_site_request_without_origin_is_refused(client: Any) -> None:
    assert client.get("/api/runs", headers={"sec-fetch-site": "cross-site"}).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_a_viewer_only_shows(client: Any, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


def test_every_answer_carries_the_strict_policy(client: Any) -> None:
    for address in ("/api/runs", "/api/nothing", "/nowhere"):
        headers = client.get(address).headers
        assert headers["content-security-policy"] == CONTENT_POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
    assert "unsafe" not in CONTENT_POLICY


def test_beyond_this_machine_only_the_token_opens(run_folder: Path) -> None:
    client = client_of(run_folder, host="0.0.0.0", base="http://10.1.2.3:8000")
    assert client.get("/api/runs").status_code == 403
    assert client.get("/api/runs?token=wrong").status_code == 403
    assert client.get(f"/api/runs?token={client.policy.token}").status_code == 200
    # The cookie that came with it is enough from then on, and no script can read it.
    assert client.get("/api/runs").status_code == 200
    cookie = client.get(f"/api/runs?token={client.policy.token}").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie


def test_beyond_this_machine_a_name_that_was_rebound_is_refused_even_with_the_token(run_folder: Path) -> None:
    client = client_of(run_folder, host="0.0.0.0", base="http://10.1.2.3:8000")
    address = f"/api/runs?token={client.policy.token}"
    assert client.get(address, headers={"host": "evil.example:8000"}).status_code == 421


@pytest.fixture(scope="module")
def served(run_folder: Path) -> Iterator[ViewerServer]:
    if not assets.built():
        pytest.skip("the page is not built (`make frontend`)")
    with ViewerServer(Catalog.open([run_folder])) as server:
        yield server


def raw(server: ViewerServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    return received


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/..%2f..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/static/../server.py",
        "/api/../../server.py",
        "/api/slice?site=../../../../etc/passwd&step=0",
        "/app.js/../../server.py",
        "/\\..\\..\\etc\\passwd",
        "/%00",
        "http://evil.example/api/runs",
    ],
)
def test_no_path_leads_out_and_the_server_goes_on(served: ViewerServer, path: str) -> None:
    host = f"127.0.0.1:{served.port}"
    reply = raw(served, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    status = reply.split(b" ", 2)[1] if reply else b""
    assert b"root:" not in reply
    assert b"ViewerServer" not in reply
    if path != "http://evil.example/api/runs":
        assert status in (b"404", b"400")
    assert b"200" in raw(
        served, f"GET /api/runs HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    )


def test_malformed_requests_are_survived(served: ViewerServer) -> None:
    host = f"127.0.0.1:{served.port}".encode()
    for request in (
        b"\x00\xff" * 50 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /api/runs HTTP/1.1\r\nHost: " + host + b"\r\nHost: evil.example\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n",
    ):
        assert b" 200 " not in raw(served, request)[:20]
    assert b" 200 " in raw(served, b"GET /api/runs HTTP/1.0\r\nHost: " + host + b"\r\n\r\n")[:20]


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names with markup, nonsense in the manifest, a statistic called like a method."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    site = f"blocks.{SCRIPT}:output"
    manifest = {
        "created": SCRIPT,
        "sites": [{"name": site, "shape": [2] * 1_000_000, "class": SCRIPT}, 7, {"name": 3}, None],
        "model": {"name": SCRIPT, "children": {"x": 1, "y": {"children": "no"}}, "parameters": "many"},
        "labels": {"tokens": [SCRIPT, None, 4, "x" * 10_000]},
        "environment": [1, 2],
    }
    values = np.array([[1.0, np.nan], [np.inf, 1e300]])
    names = (site, "__proto__:output")
    with RunWriter(folder, manifest=manifest) as writer:
        for step in range(3):
            block = ScalarBlock(names, ("std", "constructor"), values)
            tensor = TensorItem(site, "value", "full", torch.ones(4, 5))
            many = TensorItem(site, "deep", "full", torch.ones([1] * 40))
            writer.write(StepRecord(step, None, None, "train", 1.0, (block,), (tensor, many)))
        writer.event("coverage", missing=[SCRIPT, {"site": SCRIPT}, None])
        writer.event("tokens", step="x", tokens=7)
        writer.event("sites", sites={"not": "a list"})
    return folder


def test_a_hostile_manifest_answers_like_any_other(hostile_folder: Path) -> None:
    client = client_of(hostile_folder)
    about = client.get("/api/about")
    assert about.status_code == 200
    assert about.headers["content-type"] == "application/json"
    assert len(about.content) < 100_000
    for question in ("runs", "findings", "coverage", "tokens?step=1"):
        assert client.get(f"/api/{question}").status_code == 200
    site = about.json()["sites"][0]["name"]
    asked = {"site": site, "statistics": "std,constructor"}
    assert client.get("/api/series", params=asked).status_code == 200
    assert client.get("/api/map", params={"statistic": "constructor"}).status_code == 200
    assert client.get("/api/slice", params={"site": site, "step": 0}).status_code in (200, 413)


def damaged(folder: Path, into: Path, change: Any) -> Path:
    shutil.copytree(folder, into)
    changed = 0
    for path in sorted(into.rglob("*.safetensors")):
        data = path.read_bytes()
        path.write_bytes(change(data))
        changed += 1
    assert changed, "the run has no segments to damage"
    return into


def _huge_shape(data: bytes) -> bytes:
    """Every shape becomes one of a million axes, the header's length corrected."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for entry in header.values():
        if isinstance(entry, dict) and "shape" in entry:
            entry["shape"] = [1] * 1_000_000
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: data[: len(data) // 2], id="truncated"),
        pytest.param(lambda data: data[:5], id="torn"),
        pytest.param(lambda data: b"\xff" * len(data), id="overwritten"),
        pytest.param(lambda data: data[:-64] + bytes(64), id="flipped"),
        pytest.param(_huge_shape, id="a million axes"),
    ],
)
def test_a_damaged_run_harms_nothing(run_folder: Path, tmp_path: Path, change: Any) -> None:
    broken = damaged(run_folder, tmp_path / "broken", change)
    client = client_of(broken, run_folder)
    for question in (
        "about?run=broken",
        "findings?run=broken",
        "coverage?run=broken",
        "map?run=broken&statistic=std&kind=output",
        "series?run=broken&site=blocks.0:output&statistics=std",
        "slice?run=broken&site=blocks.0:output&step=0",
        "histograms?run=broken&site=blocks.0.mlp.down:output",
    ):
        reply = client.get(f"/api/{question}")
        assert reply.status_code in (200, 404, 413, 422), (question, reply.text[:200])
    assert client.get("/api/map?run=first&statistic=std&kind=output").status_code == 200
