"""How results show themselves in a notebook and as figures.

A result is made far above the viewer that can draw it. So it names its picture here, and the viewer is loaded when
somebody looks.
"""

from __future__ import annotations

from typing import Any

from torchtap.errors import TorchtapError
from torchtap.registry import Registry

__all__ = ["drawn"]

_PICTURES = Registry(
    "picture",
    "torchtap.pictures",
    {
        "captured values": "torchtap.viewer.figures:seen_html",
        "comparison": "torchtap.viewer.figures:comparison_html",
        "findings": "torchtap.viewer.figures:findings_html",
        "figure": "torchtap.viewer.figures:plot",
        "run": "torchtap.viewer.figures:run_html",
        "series": "torchtap.viewer.figures:series_svg",
    },
    TorchtapError,
)


def drawn(picture: str, *arguments: Any, **options: Any) -> Any:
    """What the viewer makes of a result."""
    return _PICTURES.load(picture)(*arguments, **options)
