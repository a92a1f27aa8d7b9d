"""What is not a number but differs all the same: shapes, absent values, calls that were or were not made, plain
arguments, changes in place.

Each has an author, the module whose own code is answerable for it, and a place in the reference's order of
execution, so that it can carry a verdict like any number over its floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from torchtap.comparison.live.tracing import Called, Trace, TracedValue
from torchtap.plan.names import site_name

__all__ = ["Oddity", "OddityKind", "calls_not_made", "different_settings"]

OddityKind = Literal["shape", "absent", "extra", "not called", "argument", "in place"]


@final
@dataclass(frozen=True, slots=True)
class Oddity:
    """One difference that no number measures."""

    site: str
    at: int  # place in the reference's order of execution
    author: str | None  # the module whose code made it; None: the user's own call
    kind: OddityKind
    why: str


def calls_not_made(trace: Trace, made: set[tuple[str, int]]) -> list[Oddity]:
    """Calls of the reference that the target never made; what is inside such a call is not listed again."""
    found: list[Oddity] = []
    gone: set[str] = set()
    for called in trace.calls:
        if (called.module, called.number) in made:
            continue
        if called.parent is not None and called.parent in gone:
            gone.add(called.module)
            continue
        gone.add(called.module)
        found.append(
            Oddity(
                _first_site(trace, called),
                called.at,
                called.parent,
                "not called",
                f"`{called.module}` is not called"
                + (f" a {called.number + 1}. time" if called.number else ""),
            )
        )
    return found


def _first_site(trace: Trace, called: Called) -> str:
    event = trace.events[called.at] if called.at < len(trace.events) else None
    return event.site if event is not None and _of(event, called) else site_name(called.module, "output")


def _of(event: TracedValue, called: Called) -> bool:
    return event.module == called.module


def different_settings(called: Called, settings: dict[str, object]) -> str:
    """How the plain arguments of a call differ from the reference's, in words; empty when they do not."""
    for name in called.settings.keys() & settings.keys():
        mine, theirs = called.settings[name], settings[name]
        if type(mine) is type(theirs) and mine != theirs and not (mine != mine and theirs != theirs):
            return f"`{called.module}` is called with {name}={theirs!r} instead of {mine!r}"
    return ""
