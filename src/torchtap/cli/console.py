"""Print the output of a command: text for people, JSON for programs, tables on a `Terminal`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import click

from torchtap.sanitize import shown
from torchtap.terminal import Terminal

__all__ = ["Terminal", "json_text", "say", "say_json"]


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
