"""Serve the page of `torchtap view` and its answers about the given runs.

It guarantees, each held by a test:
- it reads and, unless started with ``--manage``, never writes; only the given runs and folders are read;
- a request that fails is answered with a status and one sentence, and the server keeps serving;
- the report uses the same table of requests, so it holds exactly what the server would answer;
- a page of another site gets nothing: foreign ``Host`` (DNS rebinding) and foreign ``Origin`` are refused;
- bound beyond this machine, every request needs the token that the printed address carries;
- only GET and HEAD exist; a viewer that manages runs also accepts POST at one address, from its own page alone;
- the page itself can load nothing from elsewhere and run no script but its own.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import logging
import re
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias, final
from urllib.parse import parse_qs

from torchtap.errors import MissingExtraError, RunError, SelectionError, TorchtapError, needing
from torchtap.sanitize import parse_json
from torchtap.viewer.activations import list_activations
from torchtap.viewer.arrays import encode_json
from torchtap.viewer.charts import (
    MapWindow,
    SliceWindow,
    changes_between,
    column_of,
    entropy_of,
    grid_difference,
    heat_map,
    histograms_of,
    mean_grid,
    ranks_at,
    ranks_of,
    scalars_of,
    series_of,
    slice_of,
    span_of,
    tensors_of,
)
from torchtap.viewer.manage import manage
from torchtap.viewer.open_run import NumberGrid, OpenRun, Refused
from torchtap.viewer.overview import about_run, comparison_of, coverage_of, findings_of, list_runs, tokens_of
from torchtap.viewer.run_index import Catalog

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = [
    "BINARY",
    "CONTENT_POLICY",
    "FILES",
    "QUESTIONS",
    "USUAL_PORT",
    "Gate",
    "Policy",
    "ViewerServer",
    "answer",
    "application",
    "asset",
    "built",
    "is_loopback",
]


# ASGI's words.
Facts: TypeAlias = dict[str, Any]  # of a request, or of a part of its answer
Receive: TypeAlias = Callable[[], Awaitable[Facts]]
Send: TypeAlias = Callable[[Facts], Awaitable[None]]
App: TypeAlias = Callable[[Facts, Receive, Send], Awaitable[None]]

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
    (b"cache-control", b"no-store"),
]


def is_loopback(host: str) -> bool:
    """Return True if ``host`` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?", flags=re.ASCII)


def _split_host(header: str) -> str:
    """The name in a Host header, lower case, without the port; nothing when it is not a host and a port."""
    found = _HOST.fullmatch(header.strip().lower())
    return (found[1] or found[2]) if found else ""


@final
@dataclass(frozen=True, slots=True)
class Policy:
    """The host names that the viewer accepts, and the token that it requires."""

    host: str
    token: str | None
    names: frozenset[str] = field(default_factory=frozenset)
    manage: bool = False

    @classmethod
    def of(
        cls, host: str, *, extra: tuple[str, ...] = (), token: str | None = None, manage: bool = False
    ) -> Policy:
        """Loopback: a token only to manage runs, since others may be at work on this machine. Else always."""
        names = {name.lower() for name in extra}
        needed = manage or not is_loopback(host)
        token = (token or secrets.token_urlsafe(24)) if needed else token
        if is_loopback(host):
            names |= {"localhost", "127.0.0.1", "::1", host.strip("[]").lower()}
        else:
            names |= {host.lower(), "localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
        return cls(host, token, frozenset(names), manage)

    def knows(self, host: str) -> bool:
        """Return True if a Host header names this viewer. Rebinding needs a name, so beyond loopback any plain
        address will do: the token stands in front of it."""
        name = _split_host(host)
        if name in self.names:
            return True
        if is_loopback(self.host):
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


@final
class Gate:
    """ASGI middleware that holds a `Policy` and adds the headers."""

    def __init__(self, app: App, policy: Policy) -> None:
        self.app = app
        self.policy = policy

    async def __call__(self, scope: Facts, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: dict[str, str] = {}
        for key, value in scope["headers"]:
            name = key.decode("latin-1").lower()
            if name == "host" and name in headers:
                await _refuse(send, 400, "two Host headers")
                return
            headers[name] = value.decode("latin-1")
        refusal = self._judge(scope, headers)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        cookie = self._cookie_to_set(scope)

        async def dressed(message: Facts) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
                if cookie is not None:
                    message["headers"].append((b"set-cookie", cookie))
            await send(message)

        await self.app(scope, receive, dressed)

    def _judge(self, scope: Facts, headers: dict[str, str]) -> tuple[int, str] | None:
        if not self.policy.knows(headers.get("host", "")):
            return 421, "this viewer does not answer to that host name; use the address that it printed"
        if scope["method"] not in ("GET", "HEAD") and not self._may_change(scope, headers):
            return 405, "a viewer only shows: GET and HEAD"
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{headers['host']}", f"https://{headers['host']}"):
            return 403, "asked from a page of another site"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["path"] != "/":
            return 403, "asked from a page of another site"
        if self.policy.token is not None and not self._has_token(scope, headers):
            return 403, "the address lacks its token; use the whole address that torchtap printed"
        return None

    def _may_change(self, scope: Facts, headers: dict[str, str]) -> bool:
        """Only the viewer's own page sends this: a foreign one cannot set the header without being asked first."""
        short = headers.get("content-length", "").isdecimal() and int(headers["content-length"]) < 100_000
        own = headers.get("x-torchtap") == "page" and "origin" in headers
        asked = (scope["method"], scope["path"]) == ("POST", "/manage")
        return self.policy.manage and asked and own and short

    def _given(self, scope: Facts) -> str:
        asked: bytes = scope.get("query_string", b"")
        return parse_qs(asked.decode("latin-1")).get("token", [""])[0]

    def _cookie_name(self, scope: Facts) -> str:
        # Cookies ignore ports: two viewers on one host must not overwrite each other's.
        return f"torchtap_{(scope.get('server') or ('', 0))[1]}"

    def _has_token(self, scope: Facts, headers: dict[str, str]) -> bool:
        assert self.policy.token is not None
        given = [self._given(scope)]
        for part in headers.get("cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self._cookie_name(scope):
                given.append(value)
        return any(
            hmac.compare_digest(g.encode("utf-8", "replace"), self.policy.token.encode()) for g in given
        )

    def _cookie_to_set(self, scope: Facts) -> bytes | None:
        if self.policy.token is None or not self._given(scope):
            return None
        return f"{self._cookie_name(scope)}={self.policy.token}; HttpOnly; SameSite=Strict; Path=/".encode()


async def _refuse(send: Send, status: int, message: str) -> None:
    body = message.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *_HEADERS]})
    await send({"type": "http.response.body", "body": body})


FILES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "licenses.txt": "text/plain; charset=utf-8",
}


def built() -> bool:
    """Return True if the page was built."""
    folder = files("torchtap.viewer").joinpath("static")
    return all(folder.joinpath(name).is_file() for name in FILES)


@cache
def asset(name: str) -> bytes:
    """One file of the page."""
    if name not in FILES:
        raise KeyError(name)
    if not built():
        raise MissingExtraError(
            "the viewer's page is not built in this installation: src/torchtap/viewer/static is empty. "
            "Installed wheels contain it; in a checkout install Node.js 20 or newer and run `make frontend`.",
            extra="view",
        )
    return files("torchtap.viewer").joinpath("static", name).read_bytes()


Parameters = Mapping[str, str]
BINARY = frozenset(
    {"map", "series", "scalars", "changes", "column", "ranks", "ranksat", "histograms", "slice", "entropy"}
)


def _whole(parameters: Parameters, name: str, *, least: int = -(2**62), most: int = 2**62) -> int | None:
    text = parameters.get(name)
    if text is None or text == "":
        return None
    try:
        number = int(text[:24])
    except ValueError:
        raise Refused(f"{name}={text[:40]!r} is not a whole number") from None
    if not least <= number <= most:
        raise Refused(f"{name}={number} is not between {least} and {most}")
    return number


def _number(parameters: Parameters, name: str, default: int, least: int, most: int) -> int:
    found = _whole(parameters, name, least=least, most=most)
    return default if found is None else found


def _site(catalog: Catalog, parameters: Parameters) -> str:
    site = parameters.get("site")
    if not site:
        raise Refused("which site? the address has no 'site'")
    return catalog[_run(parameters)].asked(site)


def _map(catalog: Catalog, parameters: Parameters) -> bytes:
    window = MapWindow(
        statistic=catalog[_run(parameters)].asked(parameters.get("statistic", "std")),
        kind=parameters.get("kind", ""),
        under=parameters.get("under", ""),
        first_step=_whole(parameters, "from"),
        last_step=_whole(parameters, "to"),
        first_row=_number(parameters, "top", 0, 0, 2**31),
        last_row=_whole(parameters, "bottom", least=0),
        rows=_number(parameters, "rows", 700, 1, 4096),
        columns=_number(parameters, "columns", 1200, 1, 8192),
        fold=_whole(parameters, "fold", least=1, most=64),
        leaves=parameters.get("leaves") != "folded",
    )
    shown = _shown(catalog, parameters)
    if window.statistic == "nonfinite":
        return heat_map(shown, window)
    relative = parameters.get("change") == "relative"
    of, minus = (_several(parameters.get(name, "")) for name in ("of", "minus"))
    if of and minus:  # the means of two groups of runs
        a, b = (_mean(catalog, names, window.statistic, parameters.get("phase", "")) for names in (of, minus))
        return heat_map(shown, window, grid_difference(a, b, relative=relative))
    against = parameters.get("against", "")
    if not against:
        return heat_map(shown, window)
    mine, other = (run.grid(window.statistic) for run in (shown, _in_phase(catalog, against, parameters)))
    return heat_map(shown, window, grid_difference(mine, other, relative=relative))


_GROUP = 100  # runs of which a mean is made
_GROUP_BYTES = 1 << 30


def _several(text: str) -> list[str]:
    """Return the names that the page joined: commas between them, a comma inside a name escaped."""
    found = re.findall(r"(?:\\.|[^,\\])+", text[:100_000])
    return [re.sub(r"\\(.)", r"\1", name) for name in found]


def _mean(catalog: Catalog, names: list[str], statistic: str, phase: str) -> NumberGrid:
    if len(names) > _GROUP:
        raise Refused(f"a group of {len(names)} runs is too large; filter it to {_GROUP}")
    grids = []
    for name in names:
        grids.append(catalog[name].in_phase(phase).grid(statistic))
        if sum(grid.values.nbytes for grid in grids) > _GROUP_BYTES:
            raise Refused("these runs are too large for a mean; filter the group to fewer", 413)
    return mean_grid(grids)


def _in_phase(catalog: Catalog, name: str, parameters: Parameters) -> OpenRun:
    return catalog[name].in_phase(parameters.get("phase", ""))


def _run(parameters: Parameters) -> str:
    return parameters.get("run", "")


def _shown(catalog: Catalog, parameters: Parameters) -> OpenRun:
    """Return the requested run, restricted to the requested phase."""
    return catalog[_run(parameters)].in_phase(parameters.get("phase", ""))


def _scalars(catalog: Catalog, parameters: Parameters) -> bytes:
    return scalars_of(
        catalog[_run(parameters)],
        _site(catalog, parameters),
        phase=parameters.get("phase") or None,
        smooth=_number(parameters, "smooth", 0, 0, 999) / 1000,
        points=_number(parameters, "points", 2000, 2, 100_000),
    )


def _changes(catalog: Catalog, parameters: Parameters) -> bytes:
    run = _shown(catalog, parameters)
    against = parameters.get("against", "")
    return changes_between(
        run,
        catalog[against].in_phase(parameters.get("phase", "")) if against else run,
        run.asked(parameters.get("statistic", "rms")),
        parameters.get("kind", ""),
        _whole(parameters, "before"),
        _whole(parameters, "after"),
    )


def _series(catalog: Catalog, parameters: Parameters) -> bytes:
    shown = _shown(catalog, parameters)
    statistics = [shown.asked(name) for name in parameters.get("statistics", "").split(",")[:40] if name]
    return series_of(
        shown,
        _site(catalog, parameters),
        statistics,
        _whole(parameters, "from"),
        _whole(parameters, "to"),
        _number(parameters, "points", 1600, 2, 100_000),
    )


def _slice(catalog: Catalog, parameters: Parameters) -> bytes:
    try:
        index = tuple(int(part[:24]) for part in parameters.get("index", "").split(",")[:32] if part != "")
    except ValueError:
        raise Refused("index is a list of whole numbers, one for each axis") from None
    window = SliceWindow(
        step=_whole(parameters, "step"),
        field=parameters.get("field", "value"),
        down=_whole(parameters, "down"),
        across=_whole(parameters, "across"),
        stack=_whole(parameters, "stack"),
        index=index,
        first_row=_number(parameters, "top", 0, 0, 2**40),
        last_row=_whole(parameters, "bottom", least=1),
        first_column=_number(parameters, "left", 0, 0, 2**40),
        last_column=_whole(parameters, "right", least=1),
        size=_number(parameters, "size", 512, 1, 2048),
    )
    shown = _shown(catalog, parameters)
    minus_run, minus_step = parameters.get("minusRun", ""), _whole(parameters, "minusStep")
    if not minus_run and minus_step is None:
        return slice_of(shown, _site(catalog, parameters), window)
    other = catalog[minus_run] if minus_run else shown
    return slice_of(
        shown, _site(catalog, parameters), window, (other, window.step if minus_step is None else minus_step)
    )


def _ranks(catalog: Catalog, parameters: Parameters) -> bytes:
    shown = _shown(catalog, parameters)
    statistic = shown.asked(parameters.get("statistic", "rms"))
    return ranks_of(shown, _site(catalog, parameters), statistic)


def _ranks_at(catalog: Catalog, parameters: Parameters) -> bytes:
    shown = _shown(catalog, parameters)
    statistic = shown.asked(parameters.get("statistic", "rms"))
    return ranks_at(shown, statistic, parameters.get("kind", ""), _whole(parameters, "step"))


QUESTIONS: dict[str, Callable[[Catalog, Parameters], bytes]] = {
    "runs": lambda catalog, p: list_runs(catalog, _number(p, "since", 0, 0, 2**53)),
    "about": lambda catalog, p: about_run(catalog[_run(p)]),
    "findings": lambda catalog, p: findings_of(catalog, _run(p)),
    "coverage": lambda catalog, p: coverage_of(catalog[_run(p)]),
    "tokens": lambda catalog, p: tokens_of(catalog[_run(p)], _whole(p, "step")),
    "map": _map,
    "series": _series,
    "scalars": _scalars,
    "changes": _changes,
    "column": lambda catalog, p: column_of(
        _shown(catalog, p),
        catalog[_run(p)].asked(p.get("statistic", "rms")),
        p.get("kind", ""),
        _whole(p, "step"),
    ),
    "ranks": _ranks,
    "ranksat": _ranks_at,
    "histograms": lambda catalog, p: histograms_of(
        _shown(catalog, p), _site(catalog, p), linear=p.get("axis") != "recorded"
    ),
    "entropy": lambda catalog, p: entropy_of(_shown(catalog, p), _site(catalog, p)),
    "tensors": lambda catalog, p: tensors_of(_shown(catalog, p), _site(catalog, p)),
    "span": lambda catalog, p: span_of(_shown(catalog, p), _site(catalog, p), p.get("field", "value")),
    "slice": _slice,
    "activations": lambda catalog, p: encode_json(list_activations(catalog.shelf.folders)),
    "comparison": lambda catalog, p: comparison_of(catalog, p.get("a", ""), p.get("b", "")),
}


def answer(catalog: Catalog, question: str, parameters: Parameters) -> bytes:
    """The body for one question."""
    asked = QUESTIONS.get(question)
    if asked is None:
        raise Refused(f"unknown question {question[:40]!r}", 404)
    return asked(catalog, parameters)


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
        if catalog.vanished(_run(parameters)):
            return 404, encode_json({"error": "the run was deleted or moved meanwhile"})
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
    raise trouble if trouble is not None else OSError("no port to bind")


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
        """The address to open in a browser, with the token if one is required."""
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
