"""The built front end: the few files of the page, read once from the package.

A checkout has its sources only (``frontend/``); a wheel has them built. Names are fixed here, so that no path
of a request is ever turned into a path of the file system.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from torchtap.errors import MissingExtraError

__all__ = ["FILES", "asset", "built"]

FILES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "licenses.txt": "text/plain; charset=utf-8",
}


def built() -> bool:
    """Whether the page is there."""
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
