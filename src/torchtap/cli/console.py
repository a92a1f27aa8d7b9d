"""The terminal, behind the gate for foreign text: everything a command prints goes through here.

rich reads ``[red]`` in a plain string as a colour and passes control characters on. A site may be called anything,
so here strings are never markup, and what would move the cursor or turn the writing around is spelled out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from torchtap.sanitize import shown

__all__ = ["Terminal", "json_text", "say", "say_json"]


class Terminal(Console):
    """A rich console that shows text as text."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or (segment.text.isascii() and segment.text.isprintable()):
                yield segment
            else:  # longer by some letters, which a table cuts off at its edge
                yield Segment(shown(segment.text, len(segment.text), lines=True), segment.style)


def say(text: str, *, err: bool = False) -> None:
    """Print one text without any layout."""
    click.echo(shown(text, 20_000, lines=True), err=err)


def say_json(value: object, *, line: bool = False) -> None:
    """Print JSON; on one line, so that a program can read it while more may follow."""
    click.echo(json_text(value, line=line))


def json_text(value: object, *, line: bool = False) -> str:
    """JSON in ASCII, whatever is in it.

    JSON has no NaN and no infinities: they are the words ``"nan"``, ``"inf"`` and ``"-inf"``.
    """
    return json.dumps(_spelled(value), indent=None if line else 2, default=str)


def _spelled(value: object) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _spelled(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(each) for each in value]
    return value
