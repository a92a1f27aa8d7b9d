"""The newest numbers of a watched training, for whoever asks while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from torchtap.errors import SessionError
from torchtap.store.record import ScalarBlock, StepRecord

__all__ = ["Newest"]


@final
class Newest:
    """The last block of each phase and of each grid."""

    def __init__(self) -> None:
        # A grid is known by the tuples that name its sides, which are the same from step to step: a block holds them.
        self._blocks: dict[tuple[str, int, int], ScalarBlock] = {}

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, record: StepRecord) -> None:
        """Keep what a step brought."""
        phase, blocks = record.phase, self._blocks
        for block in record.scalars:
            key = (phase, id(block.sites), id(block.statistics))
            blocks.pop(key, None)  # the newest last
            blocks[key] = block

    def number(self, site: str, statistic: str, phase: str | None) -> float:
        """The newest number of a site, of any phase if none is named."""
        for (of_phase, *_), block in reversed(list(self._blocks.items())):
            if phase in (None, of_phase) and site in block.sites and statistic in block.statistics:
                return float(block.values[block.sites.index(site), block.statistics.index(statistic)])
        raise SessionError(f"no {statistic!r} of {site!r} has arrived yet")

    def blocks(self) -> Iterable[ScalarBlock]:
        """All of them, the newest last."""
        return self._blocks.values()
