"""The files of one attempt of one rank, as a reader sees them while they may still be growing.

`AttemptFiles.refresh` brings the view up to date. It guarantees:
- values that were seen once stay visible. If merging replaces a file between listing and opening, or a listing misses
  a file that appears meanwhile, the folder is read again;
- a damaged file, and a file of another run, rank or attempt, is reported in ``problems`` and not used. If it is a
  merged file whose sources still exist, those are used instead;
- a renamed file counts for what its own note states;
- the work is linear in the number of files, whatever they claim.

JSON files are bounded in size before they are read, and verified if they have a checksum. A large manifest is parsed
when it is needed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from torchtap.errors import RunCorruptError, RunError, RunFormatError
from torchtap.sanitize import shown
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import (
    CLOSED,
    EVENT_RUN_ID,
    FORMAT_NAME,
    FORMAT_VERSION,
    LOCK,
    MANIFEST,
    RUN_ID,
    TEMPORARY,
    Kind,
    PartOf,
    SegmentName,
    parse_segment,
    widest,
)
from torchtap.store.format.checksum import JSON_LIMIT, is_sealed, load_json
from torchtap.store.format.segment import Segment, check_part
from torchtap.store.read.numbers import AxesCache, ClockRows, StoredGrid, join_clocks, read_clock, read_grids
from torchtap.store.read.results import Status
from torchtap.store.read.stored_tensors import StoredTensor, read_stored_tensors

__all__ = ["AttemptFiles"]

_TRIES = 5
_LONGEST_PROBLEM = 2000
_MOST_PROBLEMS = 1000
_FAR = 2**62
_PARSED_AT_ONCE = 1 << 20
_NO_CHECKSUM = "it has no checksum, which its format requires"


# --- JSON files -----------------------------------------------------------------------------------------------


@final
class Documents:
    """The manifest, the events and the closing note of an attempt. ``bad`` maps damaged files to what is wrong."""

    def __init__(self, folder: Folder, part: PartOf, bad: dict[str, str]) -> None:
        self._folder = folder
        self._part = part
        self._bad = bad
        self._stamp: object = None
        self._unread = False  # the manifest exists and is large
        self._manifest: dict[str, Any] = {}
        self._events: dict[SegmentName, list[dict[str, object]]] = {}
        self.version: int | None = None  # of the format, as the manifest states it
        self.run_id: str | None = None  # as the manifest states it; older runs have none
        self.closing: dict[str, object] | None = None

    def look_at_manifest(self) -> None:
        """Read the manifest if it is new. A large one is read when it is needed."""
        try:
            with self._folder.open(MANIFEST) as opened:
                stamp, size = opened.stamp, opened.size
        except OSError:
            stamp, size = None, 0
        if stamp is not None and stamp == self._stamp:
            return
        self._stamp = stamp
        self._unread = size > _PARSED_AT_ONCE
        if not self._unread:
            self._read_manifest()

    @property
    def manifest(self) -> dict[str, Any]:
        """Return the manifest; empty if there is none that can be read."""
        if self._unread:
            self._unread = False
            self._read_manifest()
        return self._manifest

    @property
    def has_manifest(self) -> bool:
        """Return True if there is a manifest, without reading it."""
        return self._unread or bool(self._manifest)

    def _read_manifest(self) -> None:
        manifest, sealed = self._object(MANIFEST)
        if manifest is None:
            self._stamp = None
            return
        form = manifest.get("format")
        where = f"rank {self._part[0]}, attempt {self._part[1]}"
        if not isinstance(form, dict) or form.get("name") != FORMAT_NAME:
            raise RunFormatError(f"{where}: {MANIFEST} is not that of a {FORMAT_NAME}")
        version = form.get("version")
        if type(version) is not int or version > FORMAT_VERSION:
            raise RunFormatError(
                f"{where}: the run's format is version {str(version)[:20]!r}, this torchtap reads up to version "
                f"{FORMAT_VERSION}: a newer torchtap is needed"
            )
        if version > 1 and not sealed:
            self._bad[MANIFEST] = _NO_CHECKSUM
            return
        self.version = version
        run_id = manifest.get(RUN_ID)
        self.run_id = run_id if isinstance(run_id, str) else None
        manifest.pop("check", None)
        self._manifest = manifest

    def look_at_closing(self) -> None:
        """Read the note that the writer left when it closed the run."""
        if self.closing is None:
            found, sealed = self._object(CLOSED)
            if found is not None and self._needs_checksum and not sealed:
                self._bad[CLOSED] = _NO_CHECKSUM
                found = None
            self.closing = found or {}

    @property
    def _needs_checksum(self) -> bool:
        return (self.version or 1) > 1

    def _object(self, file: str) -> tuple[dict[str, Any] | None, bool]:
        """Read a JSON object. Return it, and True if it has a checksum; None and a problem if it is damaged."""
        try:
            content = self._content(file)
            sealed = is_sealed(content)
            found = load_json(content)
            if not isinstance(found, dict):
                raise RunCorruptError("it is not a JSON object")
            if sealed and "attempt" in found:
                check_part([found.get("rank"), found["attempt"]], self._part)
            if sealed and file != MANIFEST:
                check_run(found.get(RUN_ID), self.run_id)
        except FileNotFoundError:
            return None, False
        except (RunError, OSError) as error:
            self._bad[file] = str(error)
            return None, False
        self._bad.pop(file, None)
        return found, sealed

    def _content(self, file: str) -> bytes:
        with self._folder.open(file) as opened:
            if opened.size > JSON_LIMIT:
                raise RunCorruptError(f"it has {opened.size} bytes; at most {JSON_LIMIT} are accepted")
            return opened.read(0, opened.size)

    def load_events(self, name: SegmentName) -> bool:
        """Read a file of events. Return False, and report it, if it is damaged."""
        if name in self._events:
            return True
        try:
            lines = self._content(name.file).splitlines()
            if len(lines) < name.last - name.first + 1:
                raise RunCorruptError(f"it has {len(lines)} events, fewer than its name states")
            found = []
            for line in lines:
                if not is_sealed(line) and self._needs_checksum:
                    raise RunCorruptError(_NO_CHECKSUM)
                if isinstance(event := load_json(line), dict):
                    event.pop("check", None)
                    check_run(event.pop(EVENT_RUN_ID, None), self.run_id)
                    found.append(event)
        except FileNotFoundError:
            raise
        except (RunError, OSError) as error:
            self._bad[name.file] = str(error)
            return False
        self._events[name] = found
        return True

    def keep_events(self, names: list[SegmentName]) -> None:
        """Forget the files that a wider one has replaced."""
        self._events = {name: self._events[name] for name in names}

    def events(self) -> list[dict[str, object]]:
        """Return every event, in order."""
        return [event for events in self._events.values() for event in events]


# --- segments -------------------------------------------------------------------------------------------------


@final
@dataclass(slots=True, eq=False)
class _ScalarSegment:
    """A scalar segment whose clock has been read. Its rows begin at ``start`` of the attempt's clock."""

    clock: ClockRows
    grids: list[StoredGrid]
    start: int = 0
    thinned: int = 0  # records that were left out of it


@final
class AttemptFiles:
    """The files of one attempt of one rank."""

    def __init__(self, folder: Folder, rank: int, attempt: int, axes: AxesCache) -> None:
        self.part: PartOf = rank, attempt
        self._folder = folder
        self._axes = axes
        self._bad: dict[str, str] = {}  # files that are not used, and why
        self._remarks: dict[str, str] = {}  # files that are used, though part of them is wrong
        self._own_names: dict[str, SegmentName] = {}  # by file, once its head was read: what its note states
        self._places: dict[Kind, dict[SegmentName, SegmentName]] = {}  # the file of each segment
        self._documents = Documents(folder, self.part, self._bad)
        self._scalars: dict[SegmentName, _ScalarSegment] = {}
        self._tensors: dict[SegmentName, list[StoredTensor]] = {}
        self._gaps: list[str] = []
        self.tensor_names: list[SegmentName] = []
        self.lost_steps: list[tuple[int, int]] = []  # ranges of steps whose records are damaged or missing
        self.clock = join_clocks([])

    @property
    def manifest(self) -> dict[str, Any]:
        return self._documents.manifest

    @property
    def status(self) -> Status:
        """Return how the attempt stands: closed, recording or interrupted. Recording if that is not known."""
        if self._documents.closing is not None:
            return "closed"
        return "interrupted" if self._folder.locked(LOCK) is False else "recording"

    @property
    def exists(self) -> bool:
        """Return True if there is anything to read."""
        return bool(self._documents.has_manifest or self._scalars or self.tensor_names)

    def events(self) -> list[dict[str, object]]:
        """Return everything that the writer noted, in order."""
        return [{**event, "attempt": self.part[1]} for event in self._documents.events()]

    def grids(self) -> Iterator[tuple[int, StoredGrid]]:
        """Yield every grid with the row of the clock at which its segment begins."""
        for segment in self._scalars.values():
            for grid in segment.grids:
                yield segment.start, grid

    # --- refreshing -------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the folder again."""
        tries = 0
        while True:
            noticed = self._noticed()
            try:
                if self._refresh_once(last=tries >= _TRIES):
                    return
            except FileNotFoundError:  # merged away between listing and opening
                if tries >= _TRIES:
                    return
            # Setting a damaged file aside is progress, and each look sets aside all that it meets.
            tries += self._noticed() == noticed

    def _noticed(self) -> int:
        return len(self._bad) + self._renamed()

    def _renamed(self) -> int:
        return sum(name.file != file for file, name in self._own_names.items())

    def _refresh_once(self, *, last: bool) -> bool:
        """Look once. Return False if a file is missing and the look should be repeated, which ``last`` rules out."""
        files = self._folder.names()
        self._documents.look_at_manifest()
        # In this order: the tensors of a step appear before its clock does, so every step that is found here has its
        # tensors in a later listing.
        closed = CLOSED in files
        before = self._renamed()

        def again(*missing: object) -> bool:
            return self._renamed() > before or (any(missing) and not last)

        last_flush = next(reversed(self._scalars)).last if self._scalars else -1
        scalars, scalar_gaps = self._choose(files, "scalars")
        if again(scalar_gaps, bool(scalars) and scalars[-1].last < last_flush):
            return False
        files = self._folder.names()
        tensors, tensor_gaps = self._choose(files, "tensors")
        events, event_gaps = self._choose(files, "events")
        if again(tensor_gaps, event_gaps):
            return False
        self._documents.keep_events(events)
        self._gaps = _missing_flushes(numbers=scalar_gaps, tensors=tensor_gaps, events=event_gaps)
        self._keep(scalars, tensors)
        if closed:
            self._documents.look_at_closing()
            self._gaps += _missing_flushes(
                tensors=self._missing_at_the_end("tensors", tensors),
                events=self._missing_at_the_end("events", events),
            )
        self.lost_steps = list(self._steps_lost(scalars, scalar_gaps))
        return True

    def _keep(self, scalars: list[SegmentName], tensors: list[SegmentName]) -> None:
        self._scalars = {name: self._scalars[name] for name in scalars}
        self._tensors = {name: self._tensors[name] for name in tensors if name in self._tensors}
        self.tensor_names = tensors
        start = 0
        for segment in self._scalars.values():
            segment.start = start
            start += len(segment.clock)
        self.clock = join_clocks([segment.clock for segment in self._scalars.values()])

    def _choose(self, files: list[str], kind: Kind) -> tuple[list[SegmentName], list[tuple[int, int]]]:
        """Return the segments of a kind that count, and the ranges of flushes that none of them holds."""
        places: dict[SegmentName, SegmentName] = {}
        for file in files:
            name = parse_segment(file) if file not in self._bad else None
            if name is not None and name.kind == kind:
                places.setdefault(self._own_names.get(file, name), name)
        self._places[kind] = places
        chosen = widest(places, self._usable(kind))
        if kind != "events":
            # Look once at the segments that others seem to cover: sources of a merge, or something renamed.
            for name in places.keys() - set(chosen[0]):
                at = places[name]
                if at.file not in self._bad and at.file not in self._own_names:
                    with suppress(FileNotFoundError):  # a source that merging has removed meanwhile
                        self._segment(name, at)
        return chosen

    def _usable(self, kind: Kind) -> Callable[[SegmentName], bool]:
        """Return the test that a segment of a kind must pass to count."""
        if kind == "events":
            return self._documents.load_events
        if kind == "scalars":
            return self._usable_scalars
        # Heads are read on demand, except of segments that cover others: these must hold what they claim.
        covering = _covering(self._places["tensors"])
        return lambda name: name not in covering or self._load_tensors(name)

    def _segment(self, name: SegmentName, file: SegmentName) -> Segment | None:
        """Open a segment. Return None, and report it, if it is damaged, foreign or renamed."""
        documents = self._documents
        try:
            segment = Segment(self._folder, file, least_format=documents.version or 1, part=self.part)
            check_run(segment.note.get(RUN_ID), documents.run_id)
        except FileNotFoundError:
            raise
        except (RunError, OSError) as error:
            self._bad[file.file] = str(error)
            return None
        self._own_names[file.file] = segment.name
        if segment.name != name:
            self._remarks[file.file] = f"it was renamed; its own note says {segment.name.file}"
            return None
        return segment

    def _usable_scalars(self, name: SegmentName) -> bool:
        if name in self._scalars:
            return True
        file = self._places["scalars"][name]
        segment = self._segment(name, file)
        if segment is None:
            return False
        try:
            with segment.held_open():
                clock = read_clock(segment)
                thinned = segment.note.get("thinned", 0)
                if (
                    type(thinned) is not int
                    or thinned < 0
                    or len(clock) + thinned < name.last - name.first + 1
                ):
                    raise RunCorruptError(f"it has {len(clock)} records, fewer than the flushes in its name")
                grids = read_grids(segment, len(clock), self._axes)
                self._scalars[name] = _ScalarSegment(clock, grids, thinned=thinned)
        except FileNotFoundError:
            raise
        except (RunError, OSError) as error:
            self._bad[file.file] = str(error)
            return False
        return True

    def _load_tensors(self, name: SegmentName) -> bool:
        if name in self._tensors:
            return True
        file = self._places["tensors"].get(name, name)
        segment = self._segment(name, file)
        if segment is None:
            return False
        try:
            heads = read_stored_tensors(segment)
            if segment.note.get("format") == 1:  # its names have no phase
                phases = dict(zip(self.clock.step.tolist(), self.clock.phase.tolist(), strict=True))
                heads = [head.in_phase(phases.get(head.name.step, head.name.phase)) for head in heads]
            if len(segment.header.entries) < name.last - name.first + 1:
                raise RunCorruptError(f"it has {len(heads)} tensors, fewer than the flushes in its name")
        except RunError as error:
            self._bad[file.file] = str(error)
            return False
        self._tensors[name] = heads
        return True

    def tensors_in(self, name: SegmentName) -> list[StoredTensor]:
        """Return what a tensor segment holds; nothing, and a problem, if it is damaged."""
        if name not in self._tensors and not self._load_tensors(name):
            if self._own_names.get(name.file, name) != name:
                raise FileNotFoundError(name.file)  # it holds something else: refresh and look again
            self._tensors[name] = []
        return self._tensors[name]

    def remark(self, file: str, error: RunError) -> None:
        """Report that part of a file is damaged."""
        self._remarks[file] = str(error)

    # --- damage -----------------------------------------------------------------------------------------------

    def _steps_lost(self, kept: list[SegmentName], gaps: list[tuple[int, int]]) -> Iterable[tuple[int, int]]:
        """Yield the steps that damaged and missing records may have had, from the names of the files around them."""
        end = kept[-1].last + 1 if kept else 0
        explained: set[int] = set()
        for at, name in self._damaged([*gaps, (end, _FAR)]):
            explained.add(at)
            yield name.low, name.high
        if self._records_missing() and not gaps and not explained:  # files at the end are gone
            yield max((name.high for name in kept), default=-_FAR) + 1, _FAR
        following = {name.first: at for at, name in enumerate(kept)}
        for at, (_, last) in enumerate(gaps):
            if at not in explained:
                after = following[last + 1]
                yield (kept[after - 1].high + 1 if after else -_FAR), kept[after].low - 1

    def _damaged(self, holes: list[tuple[int, int]]) -> Iterable[tuple[int, SegmentName]]:
        """Yield damaged scalar files that leave a hole, each with the hole's position."""
        starts = [first for first, _ in holes]
        for file in self._bad:
            name = parse_segment(file)
            if name is None or name.kind != "scalars":
                continue
            at = bisect_right(starts, name.last) - 1  # the last hole that begins before this segment ends
            if at >= 0 and holes[at][1] >= name.first:
                yield at, name

    def _records_missing(self) -> int:
        """Return how many of the records that were written are not found."""
        written = (self._documents.closing or {}).get("records")
        found = len(self.clock) + sum(segment.thinned for segment in self._scalars.values())
        return max(0, written - found) if type(written) is int else 0

    def _missing_at_the_end(self, kind: Kind, kept: list[SegmentName]) -> list[tuple[int, int]]:
        """Return the flushes that the closing note counts and that no file holds."""
        flushes = (self._documents.closing or {}).get("flushes")
        written = flushes.get(kind) if isinstance(flushes, dict) else None
        found = kept[-1].last + 1 if kept else 0
        return [(found, written - 1)] if type(written) is int and written > found else []

    def problems(self) -> list[str]:
        """Return everything that is damaged, missing, lost or unfinished."""
        found = [f"{file}: {what}" for file, what in (self._bad | self._remarks).items()]
        found += self._gaps
        if missing := self._records_missing():
            found.append(f"{missing} records are missing of those that were written")
        if not self._documents.has_manifest and not self._bad.get(MANIFEST):
            found.append("there is no manifest, the recording ended before it began")
        found += self._losses()
        if self.status == "interrupted":
            unfinished = sum(file.startswith(TEMPORARY) for file in self._folder.names())
            rest = f"; {unfinished} unfinished file(s) were left behind" if unfinished else ""
            found.append(f"the recording was interrupted, what was not flushed yet is missing{rest}")
        rank, attempt = self.part
        return [shown(f"rank {rank}, attempt {attempt}: {problem}", _LONGEST_PROBLEM) for problem in found]

    def _losses(self) -> list[str]:
        """Return the losses that were noted. The sum in the closing note replaces single events."""
        lost = (self._documents.closing or {}).get("lost")
        summed = lost if isinstance(lost, list) else None
        events = [event for event in self.events() if event.get("kind") == "lost"]
        noted = [_loss(event) for event in events if summed is None or "reason" not in event]
        return [
            *(f"lost: {json.dumps(one)}" for one in (summed or [])[:_MOST_PROBLEMS]),
            *noted[:_MOST_PROBLEMS],
        ]


def check_run(stated: object, run_id: str | None) -> None:
    """Raise if a file has not the id of this run. The manifests of older runs have none, and nothing is checked."""
    if run_id is not None and stated != run_id:
        whose = "it has no run id" if stated is None else f"its run id is {str(stated)[:40]!r}"
        raise RunCorruptError(f"it belongs to another run: {whose}, this run's is {run_id[:40]!r}")


def _covering(names: Iterable[SegmentName]) -> set[SegmentName]:
    """Return the segments that begin before another one has ended: one of the two hides the other."""
    found: set[SegmentName] = set()
    reach: SegmentName | None = None
    for name in sorted(names, key=lambda name: (name.first, -name.last)):
        if reach is not None and name.first <= reach.last:
            found |= {reach, name}
        if reach is None or name.last > reach.last:
            reach = name
    return found


def _loss(event: dict[str, object]) -> str:
    known = ("kind", "time", "attempt", "reason", "message")
    facts = {name: value for name, value in event.items() if name not in known}
    rest = f" {json.dumps(facts)[:_LONGEST_PROBLEM]}" if facts else ""
    return f"lost: {str(event.get('reason') or event.get('message'))[:_LONGEST_PROBLEM]}{rest}"


def _missing_flushes(**gaps: list[tuple[int, int]]) -> list[str]:
    return [
        f"{kind} of flushes {first} to {last} are missing"
        for kind, missing in gaps.items()
        for first, last in missing
    ]
