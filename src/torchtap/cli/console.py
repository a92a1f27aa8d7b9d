"""The terminal, behind the gate for foreign text: everything a command prints goes through here.

rich reads ``[red]`` in a plain string as a colour and passes control characters on. A site may be called anything,
so here strings are never markup, and what would move the cursor or turn the writing around is spelled out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from torchtap.foreign_text import shown

__all__ = ["Terminal", "say", "say_json"]


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


def say_json(value: Any) -> None:
    """Print JSON in ASCII, whatever is in it."""
    click.echo(json.dumps(value, indent=2, default=str))
