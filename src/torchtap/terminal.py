"""The terminal, behind the gate for foreign text: every table and every styled line is printed here.

rich reads ``[red]`` in a plain string as a colour and passes control characters on. A site may be called anything,
so here strings are never markup, and what would move the cursor or turn the writing around is spelled out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from torchtap.sanitize import shown

__all__ = ["Terminal"]


class Terminal(Console):
    """A rich console that shows text as text."""

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, record: bool = False) -> None:
        super().__init__(stderr=stderr, file=file, record=record, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or (segment.text.isascii() and segment.text.isprintable()):
                yield segment
            else:  # longer by some letters, which a table cuts off at its edge
                yield Segment(shown(segment.text, len(segment.text), lines=True), segment.style)
