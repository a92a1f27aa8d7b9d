"""Rewrite links that lead out of the documentation of one language.

Links to examples, benchmarks and sources lead nowhere on the site: they become plain text. Links from Chinese pages
to pages that exist in English alone lead to the English site, in whose folder ``zh`` the Chinese one lies.
"""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:examples|benchmarks|src)/[^)]*\)")
_PAGE = re.compile(r"\]\(((?:\.\./)+)([\w/-]+)\.md(#[^)]*)?\)")
_PICTURE = re.compile(r"\]\(((?:\.\./)+images/)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    markdown = _OUTSIDE.sub(r"\1", markdown)
    if not config["docs_dir"].endswith("zh"):
        return markdown
    depth = page.file.src_uri.count("/")
    below = 0 if page.file.name == "index" else 1  # a page is a folder with an index in it

    def english(link: re.Match[str]) -> str:
        if link[1].count("../") <= depth:
            return link[0]
        return f"]({'../' * below}{link[1]}{link[2]}/{link[3] or ''})"

    markdown = _PICTURE.sub(lambda link: f"]({'../' * below}{link[1]}", markdown)
    return _PAGE.sub(english, markdown)
