"""Which rank is at fault, and which mistake of a reduction explains a value that differs, where one does exactly.

Told of whole tensors alone, which are small enough to be held for every rank: an all-reduce that is missing (the ranks'
values add up to the reference's, or average to it), one that is done twice or is a sum in place of an average (as many
times the reference's as there are ranks), an average that is taken twice (one part in so many), a rank that differs
from all others, and of values in parts the rank whose part is wrong.
"""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from torchtap.comparison.measure.dtypes import resolution
from torchtap.comparison.measure.patterns import factor
from torchtap.comparison.measure.terms import MOST
from torchtap.comparison.measure.values import Value
from torchtap.comparison.recorded.spread import Spread
from torchtap.placement import Placement

__all__ = ["blamed"]

_SLACK = 64  # roundings that a sum over ranks may leave
_LEFT = 1e-5  # what an exact factor may leave unexplained, of values that were computed in float32
_MOST_RANKS = 64

Wide = npt.NDArray[np.float64]


def blamed(spread: Spread, site: str, step: int, reference: Value) -> str:
    """What the ranks did to a value that should be the reference's, in words; empty where nothing fits exactly."""
    if prod(reference.shape) > MOST or spread.placement(site, step) is None:
        return ""
    parts = _all_parts(spread, site, step)
    if parts is None:
        return ""
    right = reference.wide()
    near = _SLACK * resolution(reference.dtype)
    if spread.is_shared(site, step):
        alike = all(part.shape == right.shape for part in parts.values())
        return _of_replicas(parts, right, near) if alike else ""
    return _of_parts(spread, site, step, parts, right, near) or _factor_in_words(
        spread.run.array(site, step).astype(np.float64), right, len(parts)
    )


def _all_parts(spread: Spread, site: str, step: int) -> dict[int, Wide] | None:
    """What each rank that has a value holds; None where one cannot be read, or there is one rank, or very many."""
    holders = spread.holders(site, step)
    if not 1 < len(holders) <= _MOST_RANKS:
        return None
    values = {rank: spread.ranks[rank].value(site, step) for rank in holders}
    parts = {rank: value.wide() for rank, value in values.items() if value is not None}
    return parts if len(parts) == len(holders) else None


def _of_replicas(parts: dict[int, Wide], right: Wide, near: float) -> str:
    wrong = [rank for rank, part in parts.items() if not _is_near(part, right, near)]
    if wrong and len(wrong) < len(parts):
        return f"wrong on {_named(wrong)} of {len(parts)}"
    every = list(parts.values())
    if all(_is_near(part, every[0], near) for part in every):
        return _factor_in_words(every[0], right, len(parts))
    whole: Wide = np.sum(every, axis=0)
    if _is_near(whole, right, near):
        return f"one of {len(parts)} ranks' parts, whose sum is the reference's (an all-reduce is missing)"
    if _is_near(whole / len(parts), right, near):
        return f"one of {len(parts)} ranks' own, whose average is the reference's (an all-reduce is missing)"
    return ""


def _factor_in_words(part: Wide, right: Wide, ranks: int) -> str:
    if part.shape != right.shape:
        return ""
    times, left = factor(right, part)
    return _world_factor(times, ranks) if left <= _LEFT else ""


def _world_factor(times: float, ranks: int) -> str:
    if abs(times - ranks) <= _LEFT * ranks:
        return (
            f"{ranks} × the reference's on {ranks} ranks (summed where an average belongs, or reduced twice)"
        )
    if abs(times * ranks - 1.0) <= _LEFT:
        return (
            f"1/{ranks} of the reference's on {ranks} ranks (averaged twice, or the loss is divided as well)"
        )
    return ""


def _of_parts(spread: Spread, site: str, step: int, parts: dict[int, Wide], right: Wide, near: float) -> str:
    """The ranks whose own part is wrong, where others' are right."""
    expected = _expected(spread, site, step, parts, right)
    wrong = [rank for rank, own in expected.items() if not _is_near(parts[rank], own, near)]
    if not wrong or len(wrong) == len(parts) or len(expected) < len(parts):
        return ""
    return f"wrong in the part of {_named(wrong)} of {len(parts)}"


def _expected(spread: Spread, site: str, step: int, parts: dict[int, Wide], right: Wide) -> dict[int, Wide]:
    """What each rank's part should be; only those whose place in the whole is known."""
    found: dict[int, Wide] = {}
    start = 0
    for rank, part in parts.items():
        placed = spread.ranks[rank].run.placement(site, step)
        if placed is None or placed.flat:
            continue
        if placed.boxes is not None and len(placed.boxes) == 1:
            offset, size = placed.boxes[0]
            own = right[tuple(slice(at, at + long) for at, long in zip(offset, size, strict=True))]
        else:
            dim = _only_cut(placed)
            if dim is None or not part.ndim:
                continue
            own = right.take(range(start, min(start + part.shape[dim], right.shape[dim])), axis=dim)
            start += part.shape[dim]
        if own.shape == part.shape:
            found[rank] = own
    return found


def _only_cut(placed: Placement) -> int | None:
    """The dimension along which a value on one axis of ranks is cut; None where there are more, or none."""
    if len(placed.axes) != 1 or not placed.axes[0].share.divides:
        return None
    return placed.axes[0].share.dim or 0


def _is_near(one: Wide, other: Wide, near: float) -> bool:
    return _size(one - other) <= near * max(_size(other), 1e-300)


def _size(value: Wide) -> float:
    return float(np.linalg.norm(value.reshape(-1)))


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} alone"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"
