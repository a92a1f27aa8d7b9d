"""The first divergence of two recordings: a number over its floor, another shape, or a value that is missing.

A value that only one recording has is evidence when it should be there: both had it at an earlier step, or the
target recorded the same kind of value elsewhere in the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from torchtap.comparison.align.pairing import KnownSite, Unaligned
from torchtap.comparison.judge.result import AGREES, COMPARED, FirstDifference, Row
from torchtap.plan.names import join_path, kind_of, parent_path, path_of, paths_around, read_name

__all__ = ["MissingSite", "first_of_rows", "missing_evidence", "next_up"]

# What a module made its value from.
_GIVEN = {"output": "input", "grad_input": "grad_output", "param_grad": "grad_output"}
_FORWARD = frozenset({"input", "output", "attention"})
_GRADIENTS = frozenset({"grad_output", "grad_input", "param_grad"})


@final
@dataclass(frozen=True, slots=True)
class MissingSite:
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
) -> MissingSite | None:
    """The first site, in order, whose absence on the other side says something."""
    sides = (("reference", left, right, seen_before[1]), ("target", right, left, seen_before[0]))
    found = [
        missing
        for side, mine, theirs, before in sides
        for missing in _missing_of(side, [u.site for u in unaligned if u.side == side], mine, theirs, before)
    ]
    return min(found, key=lambda missing: (missing.place, missing.side), default=None)


def _missing_of(
    side: str, alone: Sequence[str], mine: Sequence[KnownSite], theirs: Sequence[KnownSite], before: set[str]
) -> Iterator[MissingSite]:
    """Of the sites that one side alone has, those that the other had at an earlier step, or should have now."""
    places = {site.name: n for n, site in enumerate(mine)}
    kinds = {kind_of(site.name) for site in theirs}
    paths = {path_of(site.name) for site in theirs}
    other = "target" if side == "reference" else "reference"
    for site in alone:
        kind = kind_of(site)
        if site in before:
            yield MissingSite(site, side, places[site], f"is missing in the {other} from here on")
        elif kind in _GRADIENTS and kind in kinds and path_of(site) in paths:
            yield MissingSite(site, side, places[site], f"is missing in the {other}")


def next_up(missing: MissingSite, step: int | None) -> FirstDifference:
    """A verdict that rests on a missing value."""
    name = read_name(missing.site)
    of_parameter = name.kind == "param_grad" and step is not None
    if of_parameter:
        what = (
            f"the gradient of `{join_path(name.path, name.leaf)}` {missing.why.removesuffix(' from here on')}"
        )
    else:
        what = f"the {'gradient' if name.kind in _GRADIENTS else 'value'} {missing.why}"
    return FirstDifference(
        site=missing.site,
        module=name.path if name.kind != "input" else parent_path(name.path),
        index=missing.place,
        error=float("nan"),
        floor=float("nan"),
        origin="update" if of_parameter else "structure",
        sure="likely",
        step=step,
        what=what,
    )


def first_of_rows(rows: Sequence[Row]) -> tuple[FirstDifference, Row] | None:
    """The earliest row that differs, by value or by shape, and whose fault it seems to be."""
    at = next((n for n, row in enumerate(rows) if row.status in ("diverged", "other shape")), None)
    if at is None:
        return None
    row, earlier = rows[at], rows[:at]
    agreed = _last_that_agrees(earlier)
    local = _is_local(row, rows)
    told = (local or agreed is not None) and _stands_out(row, earlier)
    first = FirstDifference(
        site=row.site,
        module=_author(row, rows),
        index=row.index,
        error=row.error,
        floor=row.floor,
        origin="local" if local else "unknown",
        sure="likely" if told else "possible",
        evidence="its inputs agree" if local and row.kind != "input" else "",
        after=agreed,
    )
    if row.status == "other shape":
        return replace(first, origin="structure", what=row.note), row
    return replace(first, contained=_container_that_agrees(row, rows)), row


def _last_that_agrees(rows: Sequence[Row]) -> str | None:
    return next((each.site for each in reversed(rows) if each.status in AGREES), None)


def _is_local(row: Row, rows: Sequence[Row]) -> bool:
    """Whether what the value was made from was recorded and agrees."""
    if row.kind == "input":
        return True
    given = _GIVEN.get(row.kind)
    inputs = [r for r in rows if r.module == row.module and r.kind == given and r.status in COMPARED]
    return bool(inputs) and all(each.status != "diverged" for each in inputs)


def _stands_out(row: Row, earlier: Sequence[Row]) -> bool:
    """Whether a row is far enough over its floor, with nothing unreadable before it that may be the true first."""
    far = row.status == "other shape" or row.excess > 4
    return far and all(each.status != "unreadable" for each in earlier)


def _container_that_agrees(row: Row, rows: Sequence[Row]) -> str | None:
    """The smallest module around a value whose outputs all agree: the difference inside it cancels out or dies."""
    if row.kind not in _FORWARD:
        return None
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
