"""Which process of a training this is: its rank, how many there are, and which launch it belongs to.

The process group knows best: `mp.spawn` with ``init_process_group(rank=...)`` leaves nothing in the environment. Where
there is none yet, the launcher's variables count. No process is asked anything; each answers for itself.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple, final

from torch import distributed

__all__ = ["Identity", "identity"]


@final
class Identity(NamedTuple):
    """A process among those of one training."""

    rank: int
    world: int
    told_by: Literal["process group", "environment", "nobody"]


def identity() -> Identity:
    """The rank of this process and the number of processes; 0 of 1 where nobody says anything else."""
    if distributed.is_available() and distributed.is_initialized():
        return Identity(distributed.get_rank(), distributed.get_world_size(), "process group")
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if rank is None:
        return Identity(0, 1, "nobody")
    return Identity(rank, max(world or 1, rank + 1), "environment")


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isdecimal() else None
