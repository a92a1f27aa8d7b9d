"""Keep the number of files small (placeholder until merging lands)."""

from __future__ import annotations

from typing import final

from torchtap.store.layout import SegmentName
from torchtap.store.place import Place

__all__ = ["Merger"]


@final
class Merger:
    def __init__(self, place: Place) -> None:
        self._place = place

    def appeared(self, name: SegmentName) -> None: ...

    def merge_some(self) -> None: ...

    def finish(self) -> None: ...
