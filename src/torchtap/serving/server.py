"""Start vLLM's OpenAI-compatible server with taps, and let requests ask to be recorded.

A request asks in its body: ``extra_body={"torchtap": {"sites": [...], "rows": 500}}``. `RequestRecording` (given to
vLLM as ``--middleware``) checks that, passes it on in ``vllm_xargs``, and keeps the request out of the prefix cache,
so that all its tokens are computed. A bad request gets status 400, and nothing else happens. ``GET /torchtap/requests``
lists what was recorded, ``GET /torchtap/requests/<id>`` describes one.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, final
from urllib.parse import unquote

from torchtap.errors import PlanError, SelectionError
from torchtap.sanitize import parse_json, read_file
from torchtap.serving.values import open_run

__all__ = ["RequestRecording", "arguments"]

_FOLDER = "TORCHTAP_SERVE_OUT"
_PATHS = ("/v1/completions", "/v1/chat/completions")
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def arguments(
    model: str, sites: Sequence[str], out: str | os.PathLike[str], *, every: int = 0, budget: int = 4096
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of vLLM's ``api_server`` that serve a model with taps, and the environment that it needs."""
    folder = Path(out).absolute()
    if every < 0 or budget < 1:
        raise PlanError(
            f"every={every} and budget={budget}: give numbers of requests and rows, from 0 and from 1"
        )
    settings = {"sites": list(sites), "out": str(folder), "every": every, "budget": budget}
    words = [
        f"--model={model}",
        "--worker-cls=torchtap.serving.vllm_tap_worker.TapWorker",
        f"--additional-config={json.dumps({'torchtap': settings})}",
        "--middleware=torchtap.serving.server.RequestRecording",
    ]
    return words, {_FOLDER: str(folder)}


@final
class RequestRecording:
    """ASGI middleware: read ``torchtap`` from the body of a request, and answer under ``/torchtap``."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._folder = Path(os.environ.get(_FOLDER, "."))

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"].startswith("/torchtap/requests") and scope["method"] == "GET":
            await _answer(send, *self._described(scope["path"].removeprefix("/torchtap/requests").strip("/")))
        elif scope["path"] in _PATHS and scope["method"] == "POST":
            await self._recorded(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _recorded(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = bool(message.get("more_body"))
        try:
            body = self._translated(body)
        except (PlanError, SelectionError) as error:
            await _answer(send, 400, {"error": {"message": str(error), "type": "torchtap", "code": 400}})
            return
        headers = [each for each in scope["headers"] if each[0] != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        sent = False

        async def again() -> dict[str, Any]:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)

    def _translated(self, body: bytes) -> bytes:
        """Return the body with the settings for torchtap as arguments of vLLM."""
        try:
            data = parse_json(body)
        except ValueError:
            return body  # vLLM answers that
        if not isinstance(data, dict) or "torchtap" not in data:
            return body
        asked = data.pop("torchtap")
        if not isinstance(asked, Mapping) or not set(asked) <= {"sites", "rows"}:
            raise PlanError(f"torchtap={asked!r}: give an object with 'sites' (a list) and 'rows' (a number)")
        rows = asked.get("rows", 1 << 30)
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise PlanError(f"rows={rows!r}: give the largest number of tokens to record, from 1")
        extra = {**(data.get("vllm_xargs") or {}), "torchtap_rows": rows}
        if "sites" in asked:
            extra["torchtap_sites"] = self._known(asked["sites"])
        data["vllm_xargs"] = extra
        data.setdefault("cache_salt", f"torchtap-{uuid.uuid4().hex}")
        return json.dumps(data).encode()

    def _known(self, sites: Any) -> list[str]:
        path = self._folder / "sites.json"
        known = parse_json(read_file(path)) if path.exists() else []
        if not isinstance(sites, list) or not sites:
            raise PlanError(f"sites={sites!r}: give a list of sites; the server has {', '.join(known[:4])} …")
        for site in sites:
            if site not in known:
                near = get_close_matches(str(site), known, 3) or known[:3]
                raise SelectionError(
                    f"this server does not record {site!r}; of its {len(known)} sites the nearest are {', '.join(near)}"
                )
        return list(sites)

    def _described(self, name: str) -> tuple[int, Any]:
        try:
            run = open_run(self._folder)
            if not name:
                return 200, {"requests": run.requests, "problems": run.problems}
            values = run.tokens(unquote(name))
        except (SelectionError, FileNotFoundError) as error:
            return 404, {"error": {"message": str(error), "type": "torchtap", "code": 404}}
        return 200, {
            "request": values.request.id,
            "tokens": values.tokens,
            "prompt": len(values.request.prompt),
            "positions": values.positions,
            "sites": {site: list(value.shape) for site, value in values.items()},
            "missing": values.missing,
            "folder": str(self._folder),
        }


async def _answer(send: Send, status: int, data: Any) -> None:
    body = json.dumps(data).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
