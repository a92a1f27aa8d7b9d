"""The server's middleware: what a request may ask, and what it is answered."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtap.errors import PlanError
from torchtap.serving.addresses import Request, RequestTokens
from torchtap.serving.server import RequestRecording, arguments
from torchtap.serving.values import write_request


def ask(
    monkeypatch: pytest.MonkeyPatch, folder: Path, method: str, path: str, body: bytes = b""
) -> tuple[int, Any, dict[str, Any] | None]:
    """Send one call; return status, answer, and the body that reached the application."""
    monkeypatch.setenv("TORCHTAP_SERVE_OUT", str(folder))
    reached: dict[str, Any] = {}
    sent: list[dict[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        reached["body"] = json.loads((await receive())["body"])
        reached["length"] = int(dict(scope["headers"])[b"content-length"])
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    # In a thread: another test may have left an event loop running in this one.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, RequestRecording(application)(scope, receive, send)).result()
    return sent[0]["status"], json.loads(sent[1]["body"]), reached.get("body")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sites.json").write_text(json.dumps(["model.layers.0:output", "model.layers.1:output"]))
    request = Request("cmpl-1-0-0123abcd", [5, 6], [7], finished=True, parent="cmpl-1-0")
    write_request(tmp_path, RequestTokens(request, [0, 1], {"model.layers.0:output": torch.ones(2, 4)}))
    return tmp_path


def test_a_request_that_asks_is_passed_on_in_the_words_of_vllm(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    body = {
        "prompt": [1],
        "torchtap": {"sites": ["model.layers.1:output"], "rows": 9},
        "vllm_xargs": {"a": 1},
    }
    status, _, reached = ask(monkeypatch, folder, "POST", "/v1/completions", json.dumps(body).encode())
    assert status == 200
    assert reached is not None
    assert reached.pop("cache_salt").startswith("torchtap-")
    extra = {"a": 1, "torchtap_rows": 9, "torchtap_sites": ["model.layers.1:output"]}
    assert reached == {"prompt": [1], "vllm_xargs": extra}


def test_a_request_that_does_not_ask_is_not_changed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert ask(monkeypatch, folder, "POST", "/v1/completions", b'{"prompt": [1]}')[2] == {"prompt": [1]}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (7, "give an object"),
        ({"site": []}, "give an object"),
        ({"rows": 0}, "rows=0"),
        ({"rows": True}, "rows=True"),
        ({"sites": []}, "give a list of sites"),
        ({"sites": ["model.layer.1:output"]}, "the nearest are model.layers.1:output"),
    ],
)
def test_a_bad_request_gets_400_and_does_not_reach_the_engine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, asked: object, words: str
) -> None:
    body = json.dumps({"prompt": [1], "torchtap": asked}).encode()
    status, answer, reached = ask(monkeypatch, folder, "POST", "/v1/chat/completions", body)
    assert (status, reached) == (400, None)
    assert words in answer["error"]["message"]


def test_recorded_requests_are_listed_and_described(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert ask(monkeypatch, folder, "GET", "/torchtap/requests")[1]["requests"] == ["cmpl-1-0-0123abcd"]
    status, answer, _ = ask(monkeypatch, folder, "GET", "/torchtap/requests/cmpl-1")
    assert (status, answer["tokens"], answer["sites"]) == (200, [5, 6, 7], {"model.layers.0:output": [2, 4]})
    status, answer, _ = ask(monkeypatch, folder, "GET", "/torchtap/requests/cmpl-9")
    assert status == 404
    assert "is not among the 1 recorded ones" in answer["error"]["message"]


def test_numbers_of_the_command_are_checked(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="budget=0"):
        arguments("model", ["layers.*"], tmp_path, budget=0)
