"""Names that a stranger may give to a site, a statistic, a field, a phase or a message."""

from __future__ import annotations

import random

__all__ = ["CURSES", "hostile_names"]

# Each kind of trouble once, small enough for every test.
CURSES: dict[str, str] = {
    "an escape sequence": "\x1b[2J\x1b[31mred:output",
    "a title of the window": "\x1b]0;owned\x07:output",
    "a C1 control": "a\x9b31mb:output",
    "an operating system command in C1": "\x9d0;owned\x9c:output",
    "a carriage return": "good\rbad:output",
    "a backspace": "abc\x08\x08\x08xyz:output",
    "a line end": "one\ntwo:output",
    "a zero": "a\x00b:output",
    "writing turned around": "abc\u202eexe.txt:output",
    "an isolate": "\u2066abc\u2069:output",
    "letters without width": "a\u200bb\u200dc\ufeffd:output",
    "a line separator": "a\u2028b\u2029c:output",
    "a lone surrogate": "a\ud800b:output",
    "the other half": "\udfff:output",
    "half a pair from a file name": "\udc80\udcff:output",
    "markup that closes": "[/]x:output",
    "markup that opens": "[bold red blink]x:output",
    "a link in markup": "[link=file:///etc/passwd]x[/link]:output",
    "an emoji code": ":skull::output",
    "a script": "<script>alert(1)</script>:output",
    "an image that fails": "<img src=x onerror=alert(1)>:output",
    "an attribute that ends": "\"' onmouseover='alert(1)':output",
    "the end of a script": "</script></style><script>alert(1)//:output",
    "an object's own key": "__proto__",
    "another": "constructor",
    "a key of every site": "__proto__:output",
    "a path": "../../../etc/passwd:output",
    "a formula": "$\\frac{1}{0}$:output",
    "half a formula": "a$b:output",
    "a spreadsheet's formula": "=cmd|' /C calc'!A0:output",
    "nothing": "",
    "dots": "..",
    "a space": " ",
    "quotes": "\"'`:output",
    "a comma": "a,b;c\td:output",
    "a percent": "%s%n%00%2F:output",
    "braces": "{0}{__class__}:output",
    "a long one": "x" * 70_000 + ":output",
    "tags": "a\U000e0041\U000e0042:output",
    "a combining crowd": "a" + "\u0301" * 300 + ":output",
    "right to left letters": "\u05d0\u05d1\u05d2:output",
    "wide letters": "\uff21\uff22:output",
    "a private letter": "\ue000\U0010ffff:output",
}

_LETTERS = [
    *"abcxyz019._-:/#[](){}<>&\"'`$%\\|;,=+*?!@~ ", "\x1b[", "\x1b]", "\x9b", "\x07", "\r", "\n", "\t", "\x00", "\x7f",
    "\u202e", "\u2066", "\u200b", "\u2028", "\ud800", "\udfff", "\udc80", "\ufeff", "\ufffe", "\U000e0041", "é", "中",
    "😀", "__proto__", "[/]", "[red]", "</script>", "..", "%2F", "constructor",
]  # fmt: skip


def hostile_names(count: int, seed: int) -> list[str]:
    """So many different names: first those that are known to hurt, then made up."""
    chance = random.Random(seed)
    found = dict.fromkeys(CURSES.values())
    while len(found) < count:
        length = chance.choice((1, 2, 3, 8, 20, 60)) if chance.random() < 0.98 else 5000
        name = "".join(chance.choices(_LETTERS, k=length))
        # two halves side by side are one letter, in JSON as in UTF-16
        found[name.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")] = None
    return list(found)[:count]
