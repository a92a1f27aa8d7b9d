"""One attempt of one rank, as a reader sees it while it may still be growing.

`refresh` brings it up to date and guarantees that what was seen stays seen: files that merging replaces
between listing and opening, or that a listing misses because they appear meanwhile, are looked for again. A
damaged file is noted in ``problems`` and left out; if it is a merged one whose sources are still there,
those are used in its stead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, final

from torchtap.errors import RunCorruptError, RunError, RunFormatError
from torchtap.foreign_text import shown
from torchtap.store.files.folder import Folder
from torchtap.store.files.layout import (
    CLOSED,
    FORMAT_NAME,
    FORMAT_VERSION,
    LOCK,
    MANIFEST,
    TEMPORARY,
    Kind,
    SegmentName,
    parse_segment,
    widest,
)
from torchtap.store.format.header import load_json
from torchtap.store.format.segment import Segment
from torchtap.store.read.clock import ClockRows, join_clocks, read_clock
from torchtap.store.read.grids import AxesCache, Grid, read_grids
from torchtap.store.read.results import TensorRef
from torchtap.store.read.stored_tensors import StoredTensor, read_stored_tensors

__all__ = ["Part", "ScalarSegment"]

_MAX_JSON = 256 << 20
_TRIES = 5
_LONGEST_PROBLEM = 2000


@final
@dataclass(frozen=True, slots=True, eq=False)
class ScalarSegment:
    """A scalar segment whose clock has been read."""

    start: int  # where its rows begin in the part's clock
    clock: ClockRows
    grids: list[Grid]


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
        self._read: dict[SegmentName, tuple[ClockRows, list[Grid]]] = {}
        self._tensor_heads: dict[SegmentName, list[StoredTensor]] = {}
        self._event_files: dict[SegmentName, list[dict[str, Any]]] = {}
        self._notes: list[str] = []
        self._last_flush = -1
        self._manifest_stamp: object = None
        self.scalars: list[ScalarSegment] = []
        self.tensor_names: list[SegmentName] = []
        self.clock = join_clocks([])
        self.manifest: dict[str, Any] = {}
        self.closing: dict[str, Any] | None = None  # what the writer said when it closed the run
        self.unfinished = 0  # files under temporary names

    def refresh(self) -> None:
        """Look at the folder again."""
        tries = 0
        while True:
            damaged = len(self._bad)
            try:
                if self._refresh_once(last=tries >= _TRIES):
                    return
            except FileNotFoundError:  # merged away between listing and opening
                if tries >= _TRIES:
                    return
            # setting a damaged file aside is progress, and there are only so many files
            tries += len(self._bad) == damaged

    def _refresh_once(self, *, last: bool) -> bool:
        """One look; False when it should be repeated, which ``last`` rules out for whatever is missing."""
        files = self._folder.names()
        self._load_manifest()
        # In this order: a step's tensors appear before its clock does, so that every step that is found here
        # has its tensors in a listing made later.
        closed = CLOSED in files
        scalars, scalar_gaps = self._choose(files, "scalars")
        shrunk = bool(scalars) and scalars[-1].last < self._last_flush
        if (scalar_gaps or shrunk) and not last:
            return False
        segments: list[ScalarSegment] = []
        start = 0
        for name in scalars:
            if name not in self._read:
                try:
                    segment = Segment(self._folder, name)
                    clock = read_clock(segment)
                    self._read[name] = clock, read_grids(segment, len(clock), self._axes)
                except (RunError, OSError) as error:
                    self._set_aside(name.file, error)
                    return False  # choose again without it
            clock, grids = self._read[name]
            segments.append(ScalarSegment(start, clock, grids))
            start += len(clock)
        files = self._folder.names()
        tensors, tensor_gaps = self._choose(files, "tensors")
        events, event_gaps = self._choose(files, "events")
        if (tensor_gaps or event_gaps) and not last:
            return False
        self._load_events(events)
        self._notes = [
            f"{self.label}: {kind} of flushes {first} to {final} are missing"
            for kind, gaps in (("numbers", scalar_gaps), ("tensors", tensor_gaps), ("events", event_gaps))
            for first, final in gaps
        ]
        self._read = {name: self._read[name] for name in scalars}
        self._tensor_heads = {
            name: heads for name, heads in self._tensor_heads.items() if name in set(tensors)
        }
        self._last_flush = scalars[-1].last if scalars else -1
        self.scalars = segments
        self.tensor_names = tensors
        self.clock = join_clocks([segment.clock for segment in segments])
        self.unfinished = sum(file.startswith(TEMPORARY) for file in files)
        if closed and self.closing is None:
            self.closing = self._load_object(CLOSED) or {}
        return True

    def _choose(self, files: list[str], kind: Kind) -> tuple[list[SegmentName], list[tuple[int, int]]]:
        names = [name for file in files if file not in self._bad and (name := parse_segment(file))]
        return widest(name for name in names if name.kind == kind)

    def _set_aside(self, file: str, error: Exception) -> None:
        if isinstance(error, FileNotFoundError):
            raise error
        self._bad[file] = str(error)

    def _load_object(self, file: str) -> dict[str, Any] | None:
        """A small JSON file; ``None`` and a problem when it is damaged."""
        try:
            with self._folder.open(file) as opened:
                if opened.size > _MAX_JSON:
                    raise RunCorruptError(f"it has {opened.size} bytes; at most {_MAX_JSON} are accepted")
                found = load_json(opened.read(0, opened.size))
            if not isinstance(found, dict):
                raise RunCorruptError("it is not a JSON object")
        except FileNotFoundError:
            return None
        except (RunError, OSError) as error:
            self._bad[file] = str(error)
            return None
        self._bad.pop(file, None)
        return found

    def _load_manifest(self) -> None:
        try:
            with self._folder.open(MANIFEST) as opened:
                stamp = opened.stamp
        except OSError:
            stamp = None
        if stamp is not None and stamp == self._manifest_stamp:
            return  # a large one takes long to parse, and it hardly ever changes
        manifest = self._load_object(MANIFEST)
        if manifest is None:
            return
        self._manifest_stamp = stamp
        form = manifest.get("format")
        if not isinstance(form, dict) or form.get("name") != FORMAT_NAME:
            raise RunFormatError(f"{self.label}: {MANIFEST} is not that of a {FORMAT_NAME}")
        version = form.get("version")
        if type(version) is not int or version > FORMAT_VERSION:
            raise RunFormatError(
                f"{self.label}: the run's format is version {version!r}, this torchtap reads up to version "
                f"{FORMAT_VERSION}: a newer torchtap is needed"
            )
        self.manifest = manifest

    def _load_events(self, names: list[SegmentName]) -> None:
        for name in names:
            if name in self._event_files:
                continue
            try:
                with self._folder.open(name.file) as opened:
                    if opened.size > _MAX_JSON:
                        raise RunCorruptError(f"it has {opened.size} bytes; at most {_MAX_JSON} are accepted")
                    lines = opened.read(0, opened.size).splitlines()
                found = [event for line in lines if isinstance(event := load_json(line), dict)]
            except (RunError, OSError) as error:
                self._set_aside(name.file, error)
                found = []
            self._event_files[name] = found
        self._event_files = {name: self._event_files[name] for name in names}

    def events(self) -> list[dict[str, Any]]:
        """Everything the writer noted, in order."""
        return [
            {**event, "attempt": self.attempt} for events in self._event_files.values() for event in events
        ]

    def tensors_in(self, name: SegmentName) -> list[StoredTensor]:
        """What a tensor segment holds; empty, and a problem, when it is damaged."""
        heads = self._tensor_heads.get(name)
        if heads is None:
            try:
                heads = read_stored_tensors(Segment(self._folder, name))
            except (RunError, OSError) as error:
                self._set_aside(name.file, error)
                heads = []
            self._tensor_heads[name] = heads
        return heads

    def refs_in(self, name: SegmentName, site: str | None, steps: set[int]) -> list[TensorRef]:
        """The tensors of a segment, of one site if asked, at these steps; a damaged note is a problem."""
        refs = []
        for tensor in self.tensors_in(name):
            if tensor.name.step in steps and (site is None or tensor.name.site == site):
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
        return bool(self.manifest or self.scalars or self.tensor_names)

    def problems(self) -> list[str]:
        """What is damaged, missing, lost or torn."""
        found = [f"{self.label}: {file}: {what}" for file, what in (self._bad | self._bad_notes).items()]
        found += self._notes
        if not self.manifest and not self._bad.get(MANIFEST):
            found.append(f"{self.label}: there is no manifest, the recording ended before it began")
        lost = self.closing.get("lost") if self.closing is not None else None
        told = [event for event in self.events() if event.get("kind") == "lost"]
        if isinstance(lost, list):
            # the writer's own sum, in the stead of its single events
            found += [f"{self.label}: lost: {json.dumps(one)}" for one in lost]
            told = [event for event in told if "reason" not in event]
        found += [f"{self.label}: {_told(event)}" for event in told]
        if self.closing is None and self.recording is False:
            rest = f"; {self.unfinished} unfinished file(s) were left behind" if self.unfinished else ""
            found.append(
                f"{self.label}: the recording was interrupted, what was not flushed yet is missing{rest}"
            )
        return [shown(problem, _LONGEST_PROBLEM) for problem in found]


def _told(event: dict[str, Any]) -> str:
    told = ("kind", "time", "attempt", "reason", "message")
    facts = {name: value for name, value in event.items() if name not in told}
    rest = f" {json.dumps(facts)}" if facts else ""
    return f"lost: {event.get('reason') or event.get('message')}{rest}"
