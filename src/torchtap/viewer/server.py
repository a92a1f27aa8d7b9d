"""The web server of `torchtap view`: the page, and answers about the runs it was given.

Guarantees: it reads and, unless started to manage runs, never writes; a question that fails answers with a status and
one sentence, and the server goes on; whatever is asked, only the runs and folders given at the start are read.

Not here: who may ask (`security`), what is answered (`routes`), the page (`assets`, ``frontend/``).
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, final

from torchtap.errors import RunError, SelectionError, TorchtapError, needing
from torchtap.sanitize import parse_json
from torchtap.viewer.assets import FILES, asset
from torchtap.viewer.catalog import Catalog
from torchtap.viewer.manage import manage
from torchtap.viewer.opened import Refused
from torchtap.viewer.overview import list_runs
from torchtap.viewer.routes import BINARY, answer
from torchtap.viewer.security import Gate, Policy
from torchtap.viewer.wire import encode_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["USUAL_PORT", "ViewerServer", "application"]

USUAL_PORT = 6070  # always the same, so that an open tab finds a viewer that was started again

_log = logging.getLogger("torchtap.viewer")


def _need_starlette() -> None:
    with needing("Starlette and uvicorn", "view", who="the viewer"):
        import starlette
        import uvicorn  # noqa: F401
    del starlette


def application(catalog: Catalog, policy: Policy) -> object:
    """The ASGI application for ``catalog`` behind ``policy``."""
    _need_starlette()
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import Response
    from starlette.routing import Route

    async def page(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        if name not in FILES:
            return Response("not found", 404, media_type="text/plain")
        return Response(asset(name), media_type=FILES[name])

    async def change(request: Request) -> Response:
        status, body = await run_in_threadpool(_change, catalog, await request.body())
        return Response(body, status, media_type="application/json")

    async def question(request: Request) -> Response:
        name = request.path_params["question"]
        if name == "runs":
            body = await run_in_threadpool(_runs, catalog, dict(request.query_params), policy.manage)
            return Response(body, media_type="application/json")
        status, body = await run_in_threadpool(_answer, catalog, name, dict(request.query_params))
        binary = status == 200 and name in BINARY
        kind = "application/octet-stream" if binary else "application/json"
        return Response(body, status, media_type=kind)

    routes = [
        Route("/", page),
        Route("/manage", change, methods=["POST"]),
        Route("/api/{question}", question),
        Route("/{name}", page),
    ]
    return Gate(Starlette(routes=routes), policy)


def _runs(catalog: Catalog, parameters: dict[str, str], managed: bool) -> bytes:
    since = parameters.get("since", "0")
    return list_runs(catalog, int(since) if since.isdecimal() and len(since) < 16 else 0, managed=managed)


def _change(catalog: Catalog, body: bytes) -> tuple[int, bytes]:
    try:
        return 200, encode_json(manage(catalog, parse_json(body[:100_000])))
    except Refused as refused:
        return refused.status, encode_json({"error": str(refused)})
    except ValueError:
        return 400, encode_json({"error": "this is no JSON"})
    except (OSError, TorchtapError) as trouble:
        return 422, encode_json({"error": f"this could not be done: {trouble}"[:1000]})


def _answer(catalog: Catalog, question: str, parameters: dict[str, str]) -> tuple[int, bytes]:
    try:
        return 200, answer(catalog, question, parameters)
    except Refused as refused:
        return refused.status, encode_json({"error": str(refused)})
    except SelectionError as unknown:
        return 404, encode_json({"error": str(unknown)})
    except (RunError, TorchtapError) as damaged:
        return 422, encode_json({"error": str(damaged)[:1000]})
    except MemoryError:
        return 413, encode_json({"error": "too large to show"})
    except Exception as unexpected:  # whatever a hostile run provokes, the next question is answered
        _log.warning("could not answer %s: %s", question, type(unexpected).__name__, exc_info=True)
        return 500, encode_json({"error": f"this could not be read ({type(unexpected).__name__})"})


def _listen(host: str, ports: Iterable[int]) -> socket.socket:
    """A socket on the first of ``ports`` that is free; the error of the last if none is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    trouble: OSError | None = None
    for port in ports:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host.strip("[]"), port))
            made.listen(128)  # a browser that is opened at once waits instead of failing
            return made
        except OSError as taken:
            made.close()
            trouble = taken
            if taken.errno != errno.EADDRINUSE:
                break
    raise trouble if trouble is not None else OSError("no port to listen on")


@final
class ViewerServer:
    """A viewer on a socket of its own: bound when made, so that its address is known before it serves."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        host: str = "127.0.0.1",
        port: int | None = 0,
        names: tuple[str, ...] = (),
        token: str | None = None,
        manage: bool = False,
    ) -> None:
        """``port`` None: the usual one, or the next that is free; 0: any."""
        _need_starlette()
        asset("index.html")  # say at once if the page is missing
        import uvicorn

        self.policy = Policy.of(host, extra=names, token=token, manage=manage)
        self._socket = _listen(host, range(USUAL_PORT, USUAL_PORT + 20) if port is None else [port])
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            application(catalog, self.policy),
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """What to open in a browser, with the token if one is asked for."""
        host = self.policy.host
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        if ":" in shown and not shown.startswith("["):
            shown = f"[{shown}]"
        token = "" if self.policy.token is None else f"?token={self.policy.token}"
        return f"http://{shown}:{self.port}/{token}"

    def serve(self) -> None:
        """Serve until interrupted."""
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        """Serve in a thread, until `stop`."""
        self._thread = threading.Thread(target=self.serve, name="torchtap-viewer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End what `start` began and give the port back."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout=10)
        self._socket.close()

    def __enter__(self) -> ViewerServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
