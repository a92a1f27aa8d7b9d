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
    known = _of_one_mesh({rank: placements[rank] for rank in ranks})
    if known is None:
        return Sharing((tuple(ranks[:1]),), why_own="unknown" if len(ranks) > 1 else None)
    known, why = _at_one_place(known, summed)
    axes = next(iter(known.values())).axes
    dividing = [number for number, axis in enumerate(axes) if _divides(axis, summed)]
    divided = [axes[number] for number in dividing]
    groups = _by_place(known, dividing)
    return Sharing(
        tuple(tuple(groups[key]) for key in sorted(groups)),
        prod(axis.size for axis in divided),
        _missing(divided, groups),
        why,
        is_batch=all(axis.share.kind == "batch" for axis in divided),
    )


def _of_one_mesh(placements: Mapping[int, Placement | None]) -> dict[int, Placement] | None:
    """The ranks of the lowest mesh; None where some rank's placement is not known or the ranks' meshes differ."""
    known = {rank: placed for rank, placed in placements.items() if placed is not None}
    if not known or len(known) < len(placements):
        return None
    root = min(placed.root for placed in known.values())
    of_root = {rank: placed for rank, placed in known.items() if placed.root == root}
    return of_root if len({_signature(placed) for placed in of_root.values()}) == 1 else None


def _at_one_place(
    known: dict[int, Placement], summed: bool
) -> tuple[dict[int, Placement], Literal["unknown", "partial"] | None]:
    """Only the ranks at the lowest place of each axis along which values are not put together, and why."""
    why: Literal["unknown", "partial"] | None = None
    for number, axis in enumerate(next(iter(known.values())).axes):
        kind = axis.share.kind
        places = {placed.axes[number].at for placed in known.values()}
        if len(places) > 1 and (kind == "unknown" or (kind == "partial" and not summed)):
            why = "unknown" if "unknown" in (why, kind) else "partial"
            known = {rank: placed for rank, placed in known.items() if placed.axes[number].at == min(places)}
    return known, why


def _by_place(known: Mapping[int, Placement], axes: list[int]) -> dict[tuple[int, ...], list[int]]:
    """The ranks at each place along some axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, placed in known.items():
        groups.setdefault(tuple(placed.axes[number].at for number in axes), []).append(rank)
    return groups


def _divides(axis: Axis, summed: bool) -> bool:
    return axis.share.divides or (summed and axis.share.kind == "partial")


def _signature(placed: Placement) -> tuple[tuple[str, int, str], ...]:
    return tuple((axis.name, axis.size, str(axis.share)) for axis in placed.axes)


def _missing(axes: list[Axis], groups: Mapping[tuple[int, ...], list[int]]) -> tuple[str, ...]:
    """The places of divided axes at which no rank has the value, along each axis by itself."""
    found = []
    for number, axis in enumerate(axes):
        here = {key[number] for key in groups}
        found += [f"{axis.name} {at}" for at in range(min(axis.size, 4096)) if at not in here]
    return tuple(found)
