"""One gate for text that came from elsewhere: names of sites, labels, messages in a run or a model file.

A name is data and may be anything. What a terminal, a file format or a browser would take for more than text is
spelled out (``\\x1b``, ``\\u202e``) before it gets there:

- `shown` is for people: terminals, HTML, messages. Nothing in it moves a cursor, changes the direction of writing
  or hides, and it has an end.
- `storable` is for files: every text can be encoded as UTF-8.
- `file_component` is for names inside archives: one component, short.
- `browser_text` is for the page: no lone surrogate, no name that JavaScript's objects have already, short.

Pure: text in, text out. Ordinary names pass unchanged.
"""

from __future__ import annotations

import re
import zlib
from functools import cache
from urllib.parse import quote

__all__ = ["browser_text", "file_component", "in_html", "shortened", "shown", "storable"]

_LONGEST_SHOWN = 500
_LONGEST_COMPONENT = 400
_LONGEST_IN_A_PAGE = 1000
# Controls (C0, DEL, C1), marks that change direction or take no room, line separators, tags, surrogates,
# non-characters and private use: none of them is a letter of a name.
_UNSEEN = (
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\ud800-\udfff\ue000-\uf8ff\U0001fffe\U0001ffff\U000e0000-\U0010ffff]"
)
_SURROGATES = re.compile("[\ud800-\udfff]")
# What every object of JavaScript has: as a key it would be found, or swallowed.
_OF_OBJECTS = frozenset(
    {
        "__proto__", "constructor", "prototype", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable",
        "toLocaleString", "toString", "valueOf", "__defineGetter__", "__defineSetter__", "__lookupGetter__",
        "__lookupSetter__",
    }
)  # fmt: skip


@cache
def _unseen(in_lines: bool) -> re.Pattern[str]:
    """Compiled for the first text that needs it: a large set takes a millisecond, and most names need none."""
    return re.compile(rf"(?![\n\t]){_UNSEEN}" if in_lines else _UNSEEN)


def _spell(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shown(text: str, most: int = _LONGEST_SHOWN, *, lines: bool = False) -> str:
    """The text for people to read: controls spelled out, at most ``most`` letters. ``lines`` keeps line ends."""
    cut = len(text) - most
    if cut > 0:
        text = text[:most]
    if not text.isascii() or not text.isprintable():
        text = _unseen(lines).sub(_spell, text)
    return f"{text}… ({cut} more)" if cut > 0 else text


def in_html(text: str, most: int = 5000) -> str:
    """The same as part of an HTML page, also within quotes."""
    from html import escape  # with a table of two thousand names that only pages need

    return escape(shown(text, most))


def storable(text: str) -> str:
    """The text as every format can hold it: a lone surrogate is spelled out, and then backslashes are doubled."""
    if text.isascii() or not _SURROGATES.search(text):
        return text
    return _SURROGATES.sub(_spell, text.replace("\\", "\\\\"))


def file_component(name: str) -> str:
    """A name as one short component of a path inside an archive; a long one ends in a checksum of itself."""
    safe = quote(storable(name), safe=":.#[]() ,=+-_")
    if name in ("", ".", ".."):
        return safe.replace(".", "%2E") or "%"
    return safe if len(safe) <= _LONGEST_COMPONENT else _cut(safe, name, _LONGEST_COMPONENT)


def browser_text(text: str) -> str:
    """The text as the page gets it; two names that differ stay different."""
    if text in _OF_OBJECTS:
        return f"{text} (name)"
    if not text.isascii():
        text = storable(text)
    return shortened(text, _LONGEST_IN_A_PAGE)


def shortened(text: str, most: int) -> str:
    """The text if it has at most ``most`` letters, else its beginning and a checksum of it."""
    return text if len(text) <= most else _cut(text, text, most)


def _cut(text: str, whole: str, most: int) -> str:
    raw = whole.encode("utf-8", "surrogatepass")
    return f"{text[: most - 40]}…{len(whole)}-{zlib.crc32(raw):08x}{zlib.adler32(raw):08x}"
