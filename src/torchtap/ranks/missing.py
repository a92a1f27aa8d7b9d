"""What a launch lacks of a whole: ranks that recorded nothing, ranks that ended before others, parts of sites."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

import numpy as np

from torchtap.ranks.launched import Launched
from torchtap.ranks.sharing import Sharing
from torchtap.store.read.phases import TRAINING

__all__ = ["absent_ranks", "missing_parts"]

_MOST = 20


def missing_parts(launched: Launched) -> list[str]:
    """A sentence for each thing that is missing."""
    launch = launched.launch
    return [*absent_ranks(sorted(launch.attempts), launch.world), *_ended_early(launched), *_parts(launched)][
        :1000
    ]


def absent_ranks(here: Sequence[int], world: object) -> list[str]:
    """What to say where not every process of a launch recorded."""
    if type(world) is not int or not 1 < world < 2**20 or len(here) >= world:
        return []
    absent = [rank for rank in range(world) if rank not in here]
    return [
        f"{world} processes trained, {_ranks(absent)} recorded nothing: what is divided over ranks is that of "
        f"{_ranks(here)} alone. Watch the model on every rank"
    ]


def _ended_early(launched: Launched) -> list[str]:
    """Ranks whose last step is before the others', and steps that a rank lacks in between."""
    steps = {strand.rank: strand.steps(None) for strand in launched.strands()}
    if len(steps) < 2 or any(status == "recording" for status in _statuses(launched).values()):
        return []
    every = np.unique(np.concatenate(list(steps.values())))
    found = []
    for rank, own in steps.items():
        lacking = np.setdiff1d(every, own)
        if len(lacking):
            found.append(
                f"rank {rank} has no record of {_spelled(lacking.tolist())}, which other ranks have: numbers and "
                "tensors that need its part are left out there; partial=True folds what there is"
            )
    return found


def _statuses(launched: Launched) -> dict[int, str]:
    return {strand.rank: strand.status for strand in launched.strands()}


def _parts(launched: Launched) -> list[str]:
    """Sites of which a part is nowhere, though every rank recorded something."""
    if launched.launch.absent:
        return []
    lacking: dict[tuple[str, ...], list[str]] = {}
    for site in launched.holders():
        sharing = launched.sharing(site, None, TRAINING)
        if len(sharing.parts) < sharing.expected and not _covered(launched, site, sharing):
            lacking.setdefault(sharing.missing, []).append(site)
    return [
        f"{len(sites)} site(s), the first is {sites[0]!r}, lack the part at {', '.join(missing) or 'some place'}: "
        "what is shown is folded of the others"
        for missing, sites in list(lacking.items())[:_MOST]
    ]


def _covered(launched: Launched, site: str, sharing: Sharing) -> bool:
    """Whether the boxes of the parts fill the whole: a rank may hold no element of a small parameter."""
    placed = [launched.strand(part[0]).placement(site, None, TRAINING) for part in sharing.parts]
    boxed = [
        each for each in placed if each is not None and each.boxes is not None and each.shape is not None
    ]
    if len(boxed) < len(placed):
        return False
    held = sum(prod(box.size) for each in boxed for box in each.boxes or ())
    return held >= prod(boxed[0].shape or ())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)}"


def _spelled(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {_ranges(steps)}"


def _ranges(numbers: Sequence[int]) -> str:
    """``1, 4 to 9``; long lists are cut."""
    texts = []
    for _, group in groupby(enumerate(numbers), key=lambda each: each[1] - each[0]):
        run = [number for _, number in group]
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return ", ".join(texts[:_MOST]) + (" ..." if len(texts) > _MOST else "")
