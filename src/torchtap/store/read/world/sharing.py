"""Which ranks' values make up a whole, by their placements.

Ranks that differ only along replicated axes hold the same: one of them counts. Ranks that differ along a divided axis
hold different parts. Along an axis of which nobody knows what it does, and along one whose ranks hold parts of a sum,
numbers are not put together: those at its lowest place are shown. Tensors can be summed, and are.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple, final

from torchtap.placement import Axis, Placement

__all__ = ["Sharing", "share_out"]


@final
class Sharing(NamedTuple):
    """The distinct parts of a whole: for each the ranks that hold it, in order."""

    parts: tuple[tuple[int, ...], ...]
    expected: int = 1  # how many parts there should be
    missing: tuple[str, ...] = ()  # where they would be: "dp 1"
    why_own: Literal["unknown", "partial"] | None = None  # why only one place of some axis is shown
    is_batch: bool = True  # whether parts are samples, and not pieces of a tensor


def share_out(placements: Mapping[int, Placement | None], *, summed: bool = False) -> Sharing:
    """How the values of some ranks belong together; ``summed`` has parts of a sum among the parts."""
    ranks = sorted(placements)
    known = {rank: placed for rank in ranks if (placed := placements[rank]) is not None}
    own = Sharing((tuple(ranks[:1]),), why_own="unknown" if len(ranks) > 1 else None)
    if not known or len(known) < len(ranks):
        return own
    root = min(placed.root for placed in known.values())
    known = {rank: placed for rank, placed in known.items() if placed.root == root}
    first = next(iter(known.values()))
    signature = _signature(first)
    if any(_signature(placed) != signature for placed in known.values()):
        return own
    why: Literal["unknown", "partial"] | None = None
    for number, axis in enumerate(first.axes):
        kind = axis.share.kind
        places = {placed.axes[number].at for placed in known.values()}
        if len(places) > 1 and (kind == "unknown" or (kind == "partial" and not summed)):
            why = "unknown" if "unknown" in (why, kind) else "partial"
            known = {rank: placed for rank, placed in known.items() if placed.axes[number].at == min(places)}
    dividing = [
        number
        for number, axis in enumerate(first.axes)
        if axis.share.divides or (summed and axis.share.kind == "partial")
    ]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, placed in known.items():
        groups.setdefault(tuple(placed.axes[number].at for number in dividing), []).append(rank)
    axes = [first.axes[number] for number in dividing]
    return Sharing(
        tuple(tuple(groups[key]) for key in sorted(groups)),
        prod(axis.size for axis in axes),
        _missing(axes, groups),
        why,
        is_batch=all(axis.share.kind == "batch" for axis in axes),
    )


def _signature(placed: Placement) -> tuple[tuple[str, int, str], ...]:
    return tuple((axis.name, axis.size, str(axis.share)) for axis in placed.axes)


def _missing(axes: list[Axis], groups: Mapping[tuple[int, ...], list[int]]) -> tuple[str, ...]:
    """The places of divided axes at which no rank has the value, along each axis by itself."""
    found = []
    for number, axis in enumerate(axes):
        here = {key[number] for key in groups}
        found += [f"{axis.name} {at}" for at in range(min(axis.size, 4096)) if at not in here]
    return tuple(found)
