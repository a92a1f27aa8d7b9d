"""Keep the number of files small: segments that follow one another become one.

Sixteen segments of about the same number of flushes are merged into one, sixteen of those into one again,
and so on until a segment is large enough; what is written is so written at most a few times. The merged
file appears first, is synced, and only then are the files that it covers removed: at every moment, also if
the process dies, the widest segments hold everything exactly once (see `layout.widest`).

A merge that fails changes nothing: its sources stay as they are and are left alone from then on.
"""

from __future__ import annotations

from contextlib import suppress
from typing import final

from torchtap.errors import RunError
from torchtap.store.files.destination import Destination
from torchtap.store.files.layout import Kind, SegmentName
from torchtap.store.write.merge_scalars import merge_scalars
from torchtap.store.write.merge_tensors import merge_tensors

__all__ = ["Merger"]

_TOGETHER = 16
_LARGE = {
    "scalars": 32 << 20,
    "tensors": 8 << 20,
    "events": 1 << 20,
}  # of this size they are left as they are
_LARGEST_AT_THE_END = 32 << 20  # closing a run must not take long


@final
class Merger:
    """Knows the segments of one part and merges those that are due. Used by the writer's thread."""

    def __init__(self, place: Destination) -> None:
        self._place = place
        # of each kind, the segments at the end of the sequence that may still be merged, with their sizes
        self._open: dict[Kind, list[tuple[SegmentName, int]]] = {"scalars": [], "tensors": [], "events": []}

    def appeared(self, name: SegmentName, nbytes: int) -> None:
        """A segment was written."""
        if nbytes >= _LARGE[name.kind]:
            # nothing is merged across it, so what lies before it is as merged as it will be
            self._close_group(name.kind)
        else:
            self._open[name.kind].append((name, nbytes))

    def merge_some(self) -> bool:
        """Do one merge that is due; False when none is."""
        for kind, segments in self._open.items():
            last = segments[-_TOGETHER:]
            if len(last) == _TOGETHER and _tier(last[0][0]) == _tier(last[-1][0]):
                self._merge(kind, _TOGETHER)
                return True
        return False

    def finish(self) -> None:
        """Merge what is small at the end of the sequences, as the run is being closed."""
        for kind in self._open:
            self._close_group(kind)

    def _close_group(self, kind: Kind) -> None:
        segments = self._open[kind]
        count = total = 0
        for _, nbytes in reversed(segments):
            if total + nbytes > _LARGEST_AT_THE_END:
                break
            count, total = count + 1, total + nbytes
        if count > 1:
            self._merge(kind, count)
        self._open[kind] = []

    def _merge(self, kind: Kind, count: int) -> None:
        segments = self._open[kind]
        sources = [name for name, _ in segments[-count:]]
        merged = SegmentName(
            kind,
            sources[0].first,
            sources[-1].last,
            min(name.low for name in sources),
            max(name.high for name in sources),
        )
        try:
            match kind:
                case "scalars":
                    nbytes = merge_scalars(self._place, sources, merged)
                case "tensors":
                    nbytes = merge_tensors(self._place, sources, merged)
                case "events":
                    nbytes = self._merge_events(sources, merged)
            self._place.sync([merged.file])
        except (OSError, RunError, MemoryError):
            self._open[kind] = []
            return
        for name in sources:
            with suppress(OSError):
                self._place.remove(name.file)
        del segments[-count:]
        if nbytes < _LARGE[kind]:
            segments.append((merged, nbytes))
        else:
            self._open[kind] = []

    def _merge_events(self, sources: list[SegmentName], merged: SegmentName) -> int:
        pieces = []
        for name in sources:
            with self._place.folder.open(name.file) as file:
                pieces.append(file.read(0, file.size))
        self._place.put(merged.file, pieces)
        return sum(map(len, pieces))


def _tier(name: SegmentName) -> int:
    """How often what is in a segment was merged, judged by how many flushes it holds."""
    tier, span = 0, name.last - name.first + 1
    while span >= _TOGETHER:
        tier, span = tier + 1, span // _TOGETHER
    return tier
