"""The first divergence of two recordings: a number over its floor, another shape, or a value that is missing.

A value that only one recording has is evidence when it should be there: both had it at an earlier step, or the
target recorded the same kind of value elsewhere in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torchtap.comparison.align.pairing import KnownSite, Unaligned
from torchtap.comparison.judge.result import AGREES, COMPARED, First, Row
from torchtap.names import kind_of, parent_path, path_of, paths_around

__all__ = ["Missing", "first_of_rows", "missing_evidence", "next_up"]

# What a module made its value from.
_GIVEN = {"output": "input", "grad_input": "grad_output", "param_grad": "grad_output"}
_GRADIENTS = frozenset({"grad_output", "grad_input", "param_grad"})


@final
@dataclass(frozen=True, slots=True)
class Missing:
    """A site that one recording has and the other should have."""

    site: str
    side: str  # the side that has it
    place: int  # in that side's order
    why: str


def missing_evidence(
    unaligned: Sequence[Unaligned],
    left: Sequence[KnownSite],
    right: Sequence[KnownSite],
    seen_before: tuple[set[str], set[str]],
) -> Missing | None:
    """The first site, in order, whose absence on the other side says something."""
    sides = {"reference": (left, right, seen_before[1]), "target": (right, left, seen_before[0])}
    found: list[Missing] = []
    for side, (mine, theirs, before) in sides.items():
        places = {site.name: n for n, site in enumerate(mine)}
        kinds = {kind_of(site.name) for site in theirs}
        paths = {path_of(site.name) for site in theirs}
        other = "target" if side == "reference" else "reference"
        for each in unaligned:
            if each.side != side:
                continue
            kind = kind_of(each.site)
            if each.site in before:
                found.append(
                    Missing(each.site, side, places[each.site], f"is missing in the {other} from here on")
                )
            elif kind in _GRADIENTS and kind in kinds and path_of(each.site) in paths:
                found.append(Missing(each.site, side, places[each.site], f"is missing in the {other}"))
    return min(found, key=lambda missing: (missing.place, missing.side), default=None)


def next_up(missing: Missing, step: int | None) -> First:
    """A verdict that rests on a missing value."""
    module = path_of(missing.site)
    kind = kind_of(missing.site)
    what = {"param_grad": "the gradient", "grad_output": "the gradient", "grad_input": "the gradient"}.get(
        kind, "the value"
    )
    return First(
        site=missing.site,
        module=module if kind != "input" else parent_path(module),
        index=missing.place,
        error=float("nan"),
        floor=float("nan"),
        origin="structure",
        sure="likely",
        step=step,
        what=f"{what} {missing.why}",
    )


def first_of_rows(rows: Sequence[Row]) -> tuple[First, Row] | None:
    """The earliest row that differs, by value or by shape, and whose fault it seems to be."""
    at = next((n for n, row in enumerate(rows) if row.status in ("diverged", "other shape")), None)
    if at is None:
        return None
    row = rows[at]
    agreed = next((earlier for earlier in reversed(rows[:at]) if earlier.status in AGREES), None)
    given = _GIVEN.get(row.kind)
    inputs = [r for r in rows if r.module == row.module and r.kind == given and r.status in COMPARED]
    local = row.kind == "input" or (bool(inputs) and all(r.status != "diverged" for r in inputs))
    unreadable = any(earlier.status == "unreadable" for earlier in rows[:at])
    reshaped = row.status == "other shape"
    sure = (local or agreed is not None) and (reshaped or row.excess > 4) and not unreadable
    first = First(
        site=row.site,
        module=_author(row, rows),
        index=row.index,
        error=row.error,
        floor=row.floor,
        origin="structure" if reshaped else ("local" if local else "unknown"),
        sure="likely" if sure else "possible",
        evidence="its inputs agree" if local and row.kind != "input" else "",
        after=None if agreed is None else agreed.site,
        contained=None if reshaped else _container_that_agrees(row, rows),
        what=row.note if reshaped else "",
    )
    return first, row


def _container_that_agrees(row: Row, rows: Sequence[Row]) -> str | None:
    """The smallest module around a site whose outputs all agree: the difference inside it cancels out or dies."""
    for outer in paths_around(row.module):
        outputs = [r for r in rows if r.module == outer and r.kind == "output" and r.status in COMPARED]
        if outputs and all(r.status != "diverged" for r in outputs):
            return outer
    return None


def _author(row: Row, rows: Sequence[Row]) -> str:
    """Whose own code made a value: a module its output, the module around it its input."""
    if row.kind != "input":
        return row.module
    known = {other.module for other in rows}
    return next((outer for outer in paths_around(row.module) if outer in known), "")
