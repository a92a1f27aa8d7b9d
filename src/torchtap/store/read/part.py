"""One attempt of one rank, as a reader sees it while it may still be growing.

`refresh` brings it up to date and guarantees that what was seen stays seen: files that merging replaces
between listing and opening, or that a listing misses because they appear meanwhile, are looked for again. A
damaged file is noted in ``problems`` and left out; if it is a merged one whose sources are still there,
those are used in its stead. A file that was renamed counts for what its own note says. The work is linear in the
number of files, whatever they claim.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from torchtap.errors import RunCorruptError, RunError
from torchtap.sanitize import shown
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import (
    CLOSED,
    LOCK,
    MANIFEST,
    TEMPORARY,
    Kind,
    SegmentName,
    parse_segment,
    widest,
)
from torchtap.store.format.segment import Segment
from torchtap.store.read.clock import ClockRows, join_clocks, read_clock
from torchtap.store.read.documents import Documents
from torchtap.store.read.grids import AxesCache, StoredGrid, read_grids
from torchtap.store.read.results import TensorRef
from torchtap.store.read.stored_tensors import StoredTensor, read_stored_tensors

__all__ = ["Part", "ScalarSegment"]

_TRIES = 5
_LONGEST_PROBLEM = 2000
_MOST_PROBLEMS = 1000
_FAR = 2**62


@final
@dataclass(frozen=True, slots=True, eq=False)
class ScalarSegment:
    """A scalar segment whose clock has been read."""

    start: int  # where its rows begin in the part's clock
    clock: ClockRows
    grids: list[StoredGrid]


@final
class Part:
    """The files of one attempt of one rank."""

    def __init__(self, folder: Folder, rank: int, attempt: int, axes: AxesCache) -> None:
        self.rank = rank
        self.attempt = attempt
        self.label = f"rank {rank}, attempt {attempt}"
        self._folder = folder
        self._axes = axes
        self._bad: dict[str, str] = {}  # damaged files and what is wrong with them
        self._bad_notes: dict[str, str] = {}  # files of which a part is damaged
        self._renamed: dict[str, SegmentName] = {}  # by the file's name: what it holds by its own note
        self._places: dict[Kind, dict[SegmentName, SegmentName]] = {}  # where a segment is, by what it holds
        self._covering: set[SegmentName] = set()  # tensor segments that others lie behind
        self._examined: set[str] = set()
        self._documents = Documents(folder, (rank, attempt), self._bad)
        self._read: dict[SegmentName, tuple[ClockRows, list[StoredGrid]]] = {}
        self._tensor_heads: dict[SegmentName, list[StoredTensor]] = {}
        self._notes: list[str] = []
        self._last_flush = -1
        self.scalars: list[ScalarSegment] = []
        self.tensor_names: list[SegmentName] = []
        self.lost_steps: list[tuple[int, int]] = []  # ranges of steps whose records are damaged or missing
        self.clock = join_clocks([])
        self.unfinished = 0  # files under temporary names

    @property
    def manifest(self) -> dict[str, Any]:
        return self._documents.manifest

    @property
    def launch(self) -> dict[str, Any]:
        """Which process wrote it; empty where it does not say."""
        launch = self.manifest.get("launch")
        return launch if isinstance(launch, dict) else {}

    @property
    def closing(self) -> dict[str, object] | None:
        """What the writer said when it closed the run."""
        return self._documents.closing

    def refresh(self) -> None:
        """Look at the folder again."""
        tries = 0
        while True:
            noticed = len(self._bad) + len(self._renamed)
            try:
                if self._refresh_once(last=tries >= _TRIES):
                    return
            except FileNotFoundError:  # merged away between listing and opening
                if tries >= _TRIES:
                    return
            # setting a damaged file aside is progress, and one look sets aside all that it meets
            tries += len(self._bad) + len(self._renamed) == noticed

    def _refresh_once(self, *, last: bool) -> bool:
        """One look; False when it should be repeated, which ``last`` rules out for whatever is missing."""
        files = self._folder.names()
        self._documents.look_at_manifest()
        # In this order: a step's tensors appear before its clock does, so that every step that is found here
        # has its tensors in a listing made later.
        closed = CLOSED in files
        before = len(self._renamed)

        def again(*missing: object) -> bool:
            return len(self._renamed) > before or (any(missing) and not last)

        scalars, scalar_gaps = self._choose(files, "scalars", self._usable_scalars)
        shrunk = bool(scalars) and scalars[-1].last < self._last_flush
        if again(scalar_gaps, shrunk):
            return False
        files = self._folder.names()
        tensors, tensor_gaps = self._choose(files, "tensors", self._usable_tensors)
        events, event_gaps = self._choose(files, "events", self._documents.load_events)
        if again(tensor_gaps, event_gaps):
            return False
        self._documents.keep_events(events)
        self._notes = _missing_flushes(numbers=scalar_gaps, tensors=tensor_gaps, events=event_gaps)
        self._keep(scalars, set(tensors))
        self.tensor_names = tensors
        self.unfinished = sum(file.startswith(TEMPORARY) for file in files)
        if closed:
            self._documents.look_at_closing()
            self._notes += _missing_flushes(
                tensors=self._missing_at_the_end("tensors", tensors),
                events=self._missing_at_the_end("events", events),
            )
        self.lost_steps = list(self._steps_lost(scalars, scalar_gaps))
        return True

    def _keep(self, scalars: list[SegmentName], tensors: set[SegmentName]) -> None:
        self._read = {name: self._read[name] for name in scalars}
        self._tensor_heads = {name: heads for name, heads in self._tensor_heads.items() if name in tensors}
        self._last_flush = scalars[-1].last if scalars else -1
        self.scalars = []
        start = 0
        for clock, grids in self._read.values():
            self.scalars.append(ScalarSegment(start, clock, grids))
            start += len(clock)
        self.clock = join_clocks([segment.clock for segment in self.scalars])

    def _choose(
        self, files: list[str], kind: Kind, usable: Callable[[SegmentName], bool]
    ) -> tuple[list[SegmentName], list[tuple[int, int]]]:
        places: dict[SegmentName, SegmentName] = {}
        for file in files:
            name = parse_segment(file) if file not in self._bad else None
            if name is not None and name.kind == kind:
                places.setdefault(self._renamed.get(file, name), name)
        self._places[kind] = places
        if kind == "tensors":
            self._covering = _covering(places)
        chosen = widest(places, usable)
        if kind != "events":
            self._examine(places, set(chosen[0]))
        return chosen

    def _examine(self, places: dict[SegmentName, SegmentName], chosen: set[SegmentName]) -> None:
        """Look once at the segments that others seem to cover: sources of a merge, or something that was renamed."""
        for name, file in places.items():
            if name not in chosen and file.file not in self._bad and file.file not in self._examined:
                self._examined.add(file.file)
                with suppress(FileNotFoundError):  # a source that merging has removed meanwhile
                    self._segment(name, file)

    def _segment(self, name: SegmentName, file: SegmentName) -> Segment | None:
        """A segment whose head is right and says what was expected of it; else the trouble is noted."""
        try:
            least = self._documents.version or 1
            segment = Segment(self._folder, file, least_format=least, part=(self.rank, self.attempt))
        except FileNotFoundError:
            raise
        except (RunError, OSError) as error:
            self._bad[file.file] = str(error)
            return None
        if segment.name != name:
            self._renamed[file.file] = segment.name
            self._bad_notes[file.file] = f"it was renamed; its own note says {segment.name.file}"
            return None
        return segment

    def _usable_scalars(self, name: SegmentName) -> bool:
        if name in self._read:
            return True
        file = self._places["scalars"][name]
        segment = self._segment(name, file)
        if segment is None:
            return False
        try:
            clock = read_clock(segment)
            if len(clock) < name.last - name.first + 1:
                raise RunCorruptError(f"it has {len(clock)} records, its name says more flushes")
            self._read[name] = clock, read_grids(segment, len(clock), self._axes)
        except FileNotFoundError:
            raise
        except (RunError, OSError) as error:
            self._bad[file.file] = str(error)
            return False
        return True

    def _usable_tensors(self, name: SegmentName) -> bool:
        # Heads are read when they are asked for, but for those that hide others: these must be what they claim.
        return name not in self._covering or self._load_tensors(name)

    def _load_tensors(self, name: SegmentName) -> bool:
        if name in self._tensor_heads:
            return True
        file = self._places["tensors"].get(name, name)
        segment = self._segment(name, file)
        if segment is None:
            return False
        try:
            heads = read_stored_tensors(segment)
            if segment.note.get("format") == 1:  # its names say no phase
                phases = dict(zip(self.clock.step.tolist(), self.clock.phase.tolist(), strict=True))
                heads = [head.in_phase(phases.get(head.name.step, head.name.phase)) for head in heads]
            if len(segment.header.entries) < name.last - name.first + 1:
                raise RunCorruptError(f"it has {len(heads)} tensors, its name says more flushes")
        except RunError as error:
            self._bad[file.file] = str(error)
            return False
        self._tensor_heads[name] = heads
        return True

    def _steps_lost(self, kept: list[SegmentName], gaps: list[tuple[int, int]]) -> Iterable[tuple[int, int]]:
        """The steps that damaged and missing records may have had: as the names of the files say, or in between."""
        end = kept[-1].last + 1 if kept else 0
        explained: set[int] = set()
        for at, name in self._damaged([*gaps, (end, _FAR)]):
            explained.add(at)
            yield name.low, name.high
        if self._records_missing() and not gaps and not explained:  # files at the end are gone
            yield max((name.high for name in kept), default=-_FAR) + 1, _FAR
        yield from _between(kept, [gap for at, gap in enumerate(gaps) if at not in explained])

    def _damaged(self, holes: list[tuple[int, int]]) -> Iterable[tuple[int, SegmentName]]:
        """Damaged files of numbers that leave a hole, each with the hole's place."""
        starts = [first for first, _ in holes]
        for file in self._bad:
            name = parse_segment(file)
            if name is None or name.kind != "scalars":
                continue
            at = bisect_right(starts, name.last) - 1  # the last hole that begins before this segment ends
            if at >= 0 and holes[at][1] >= name.first:
                yield at, name

    def _records_missing(self) -> int:
        """How many records the writer says it wrote and nobody finds."""
        written = (self.closing or {}).get("records")
        return max(0, written - len(self.clock)) if type(written) is int else 0

    def _missing_at_the_end(self, kind: Kind, kept: list[SegmentName]) -> list[tuple[int, int]]:
        """The flushes behind the last file that is there, up to what the writer says at its end."""
        flushes = (self.closing or {}).get("flushes")
        written = flushes.get(kind) if isinstance(flushes, dict) else None
        found = kept[-1].last + 1 if kept else 0
        return [(found, written - 1)] if type(written) is int and written > found else []

    def events(self) -> list[dict[str, object]]:
        """Everything the writer noted, in order."""
        return [{**event, "attempt": self.attempt} for event in self._documents.events()]

    def tensors_in(self, name: SegmentName) -> list[StoredTensor]:
        """What a tensor segment holds; empty, and a problem, when it is damaged."""
        if name not in self._tensor_heads and not self._load_tensors(name):
            if name.file in self._renamed:
                raise FileNotFoundError(name.file)  # it holds something else: look again
            self._tensor_heads[name] = []
        return self._tensor_heads[name]

    def refs_in(self, name: SegmentName, site: str | None, steps: set[tuple[int, str]]) -> list[TensorRef]:
        """The tensors of a segment, of one site if asked, at these steps and phases; a damaged note is a problem."""
        refs = []
        for tensor in self.tensors_in(name):
            if (tensor.name.step, tensor.name.phase) in steps and (site is None or tensor.name.site == site):
                try:
                    refs.append(tensor.ref())
                except RunError as error:
                    self._bad_notes[name.file] = str(error)
        return refs

    @property
    def recording(self) -> bool | None:
        """Whether its writer is alive; ``None`` when nobody can tell."""
        return False if self.closing is not None else self._folder.locked(LOCK)

    @property
    def exists(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._documents.has_manifest or self.scalars or self.tensor_names)

    def problems(self) -> list[str]:
        """What is damaged, missing, lost or torn."""
        found = [f"{file}: {what}" for file, what in (self._bad | self._bad_notes).items()]
        found += self._notes
        if missing := self._records_missing():
            found.append(f"{missing} records are missing of those that were written")
        if not self._documents.has_manifest and not self._bad.get(MANIFEST):
            found.append("there is no manifest, the recording ended before it began")
        found += self._losses()
        if self.closing is None and self.recording is False:
            rest = f"; {self.unfinished} unfinished file(s) were left behind" if self.unfinished else ""
            found.append(f"the recording was interrupted, what was not flushed yet is missing{rest}")
        return [shown(f"{self.label}: {problem}", _LONGEST_PROBLEM) for problem in found]

    def _losses(self) -> list[str]:
        """What was told as lost; at the end the writer's own sum stands in the stead of its single events."""
        lost = self.closing.get("lost") if self.closing is not None else None
        summed = lost if isinstance(lost, list) else None
        events = [event for event in self.events() if event.get("kind") == "lost"]
        told = [_told(event) for event in events if summed is None or "reason" not in event]
        return [
            *(f"lost: {json.dumps(one)}" for one in (summed or [])[:_MOST_PROBLEMS]),
            *told[:_MOST_PROBLEMS],
        ]


def _covering(names: Iterable[SegmentName]) -> set[SegmentName]:
    """Those that begin before another one of them has ended: one of the two hides the other."""
    found: set[SegmentName] = set()
    widest_yet: SegmentName | None = None
    for name in sorted(names, key=lambda name: (name.first, -name.last)):
        if widest_yet is not None and name.first <= widest_yet.last:
            found |= {widest_yet, name}
        if widest_yet is None or name.last > widest_yet.last:
            widest_yet = name
    return found


def _told(event: dict[str, object]) -> str:
    told = ("kind", "time", "attempt", "reason", "message")
    facts = {name: value for name, value in event.items() if name not in told}
    rest = f" {json.dumps(facts)[:_LONGEST_PROBLEM]}" if facts else ""
    return f"lost: {str(event.get('reason') or event.get('message'))[:_LONGEST_PROBLEM]}{rest}"


def _between(kept: list[SegmentName], gaps: list[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """The steps that missing files may have had: those between the files before and after them."""
    following = {name.first: at for at, name in enumerate(kept)}
    for _, last in gaps:
        after = following[last + 1]
        yield (kept[after - 1].high + 1 if after else -_FAR), kept[after].low - 1


def _missing_flushes(**gaps: list[tuple[int, int]]) -> list[str]:
    return [
        f"{kind} of flushes {first} to {last} are missing"
        for kind, missing in gaps.items()
        for first, last in missing
    ]
