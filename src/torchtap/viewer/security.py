"""Who may ask the viewer, and what the browser may do with its answers.

Guarantees, each held by a test:
- a page of another site gets nothing: foreign ``Host`` (DNS rebinding) and foreign ``Origin`` are refused;
- bound beyond this machine, every request needs the token that the printed address carries;
- only GET and HEAD exist; a viewer that manages runs also takes POST at one address, from its own page alone;
- the page itself can load nothing from elsewhere and run no script but its own.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final
from urllib.parse import parse_qs

__all__ = ["CONTENT_POLICY", "Gate", "Policy", "is_loopback"]

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
    """Whether ``host`` can be reached from this machine alone."""
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
    """Which names the viewer answers to, and the token that it asks for."""

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
        """Whether a Host header names this viewer. Rebinding needs a name, so beyond loopback any plain
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
