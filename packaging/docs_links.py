"""Links that leave the documentation (examples, benchmarks) lead nowhere on the site: they become plain text there."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:examples|benchmarks|src)/[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return _OUTSIDE.sub(r"\1", markdown)
