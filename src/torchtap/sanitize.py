"""The one gate for everything foreign: files, documents and text that this process did not make itself.

Files and documents. A path may name a pipe, a device or a terabyte, and a document may be built to exhaust memory or
the stack:

- `open_file` and `read_file` read regular files only, never block, and stop at a stated number of bytes;
- `replace_file` writes beside files of others and follows no link;
- `parse_json` and `parse_toml` raise ``ValueError`` for every text that they do not accept.

Text. A name is data and may be anything. What a terminal, a file format or a browser would take for more than text is
spelled out (``\\x1b``, ``\\u202e``) before it gets there:

- `shown` is for people: terminals, HTML, messages. Nothing in it moves a cursor, changes the direction of writing
  or hides, and it has an end.
- `storable` is for files: every text can be encoded as UTF-8.
- `file_component` is for names inside archives: one component, short.
- `browser_text` is for the page: no lone surrogate, no name that JavaScript's objects have already, short;
- `say` prints a line for people.

Ordinary names pass unchanged. tests/test_gate.py fails when code goes around this module.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import IO, Any, BinaryIO
from urllib.parse import quote

__all__ = [
    "JSON_LIMIT",
    "browser_text",
    "file_component",
    "in_html",
    "open_file",
    "parse_json",
    "parse_toml",
    "read_file",
    "replace_file",
    "say",
    "shortened",
    "shown",
    "storable",
]

JSON_LIMIT = 64 << 20  # bytes of one text
# Parsed JSON takes many times the room of its text; what it would take is estimated before it is parsed.
_FREE = 48 << 20
_BYTES_OF_A_CONTAINER, _BYTES_OF_A_VALUE = 240, 48
_LARGEST_SETTINGS = 1 << 20  # bytes of a file that a person writes

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


def say(line: str, file: IO[str] | None = None, *, most: int = 20_000) -> None:
    """Print text for people, on standard error unless a file is given."""
    print(shown(line, most, lines=True), file=file or sys.stderr)


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading. A pipe or a device is refused with ``OSError`` instead of waited for."""
    descriptor = os.open(
        path, os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_BINARY", "O_NONBLOCK"))
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_file(path: str | os.PathLike[str], most: int = _LARGEST_SETTINGS) -> bytes:
    """Return the bytes of a regular file. One with more than ``most`` is refused with ``OSError``."""
    with open_file(path) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(0, f"it has more than {most} bytes")
    return raw


def replace_file(path: Path, raw: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one. A link there is replaced, not followed."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    flags = (
        os.O_CREAT | os.O_EXCL | os.O_WRONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_BINARY"))
    )
    with os.fdopen(os.open(part, flags, 0o666), "wb") as file:
        file.write(raw)
    os.replace(part, path)


def parse_json(text: str | bytes, *, bounded: bool = True, strict: bool = False) -> Any:
    """Return the value of a JSON text; ``ValueError`` if it is not JSON, too deep, or too large for what it holds.

    ``bounded=False`` leaves size and memory to the caller. ``strict=True`` refuses NaN and infinities.
    """
    import json

    if bounded and len(text) > JSON_LIMIT:
        raise ValueError(f"it has {len(text)} bytes of JSON; at most {JSON_LIMIT} are accepted")
    if bounded and len(text) > 1 << 16 and _room_for(text) > _FREE + 4 * len(text):
        raise ValueError(f"its {len(text)} bytes of JSON would take far more memory than they should")
    try:
        return json.loads(text, parse_constant=_refuse_constant if strict else None)
    except RecursionError:
        raise ValueError("not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None


def parse_toml(raw: bytes) -> dict[str, Any]:
    """Return the values of a TOML text; ``ValueError`` if it is not TOML or too deep."""
    import tomllib

    try:
        return tomllib.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _room_for(text: str | bytes) -> int:
    """Estimate how much memory the text's values would take, at most."""
    if isinstance(text, str):
        containers, values = text.count("{") + text.count("["), text.count(",") + text.count(":")
    else:
        containers, values = text.count(b"{") + text.count(b"["), text.count(b",") + text.count(b":")
    return _BYTES_OF_A_CONTAINER * containers + _BYTES_OF_A_VALUE * values
