"""Find runs below the given paths, summarise each in a card, and open them on demand.

Guarantees:
- a run's name is its path below the given folder, so a link stays valid while runs appear and vanish;
- a folder outside the given ones, also one behind a link, is never a run;
- searching reads names of folders and no file;
- a run is opened on request, and only a few stay open;
- one request spends a bounded time on cards, so a thousand runs show their names at once and fill in later;
- a vanished run is an error, never an empty run.

Not here: reading one run (`open_run`), access control (`server`).
"""

from __future__ import annotations

import itertools
import math
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from torchtap.errors import RunNotFoundError, TorchtapError
from torchtap.sanitize import browser_text
from torchtap.store.files.folder import folder_of
from torchtap.store.files.layout import parse_rank
from torchtap.store.format.checksum import load_json
from torchtap.store.read.lookup import in_order
from torchtap.viewer.arrays import extremes
from torchtap.viewer.open_run import OpenRun, Refused

if TYPE_CHECKING:
    from torchtap import Run

__all__ = [
    "NOTES", "Card", "Catalog", "FoundRun", "Shelf", "better", "card_of", "folder_signature", "is_run",
    "loss_site", "phases_of", "read_notes", "short_text",
]  # fmt: skip


_DEPTH = 6
_MOST = 20_000
_REMOTE = 30.0  # seconds between two looks at an object store


@final
@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run that was found: its name, where it is, and the folder of runs that it lies in, if any."""

    name: str
    path: str
    root: Path | None


def is_run(names: Sequence[str]) -> bool:
    """Return True if a folder with these names in it is a run."""
    return any(parse_rank(name) is not None for name in names)


def _below(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Run folders below ``folder``; links are not followed, so nothing outside is reached."""
    try:
        with os.scandir(folder) as listed:
            inner = [entry.name for entry in listed if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    if is_run(inner):
        yield folder
    elif depth < _DEPTH:
        for name in sorted(inner):
            if not name.startswith("."):
                yield from _below(folder / name, depth + 1)


def _below_remote(address: str, depth: int = 0) -> Iterator[str]:
    """Yield the addresses of runs below a folder of an object store."""
    names = folder_of(address).names()
    if is_run(names):
        yield address
    elif depth < _DEPTH:
        for name in sorted(name for name in names if not name.startswith(".")):
            yield from _below_remote(f"{address}/{name}", depth + 1)


@final
class Shelf:
    """The paths that were given, and what is found there now. Object stores are listed every `_REMOTE` seconds."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._given = [os.fspath(path) for path in paths]
        for path in self._given:
            if "://" not in path and not os.path.isdir(path):
                raise RunNotFoundError(f"there is no run and no folder of runs at {path}")
        self.folders = [Path(path).resolve() for path in self._given if self._is_folder(path)]
        self._listed: dict[str, tuple[float, list[str]]] = {}
        self.stores = [
            path for path in self._given if "://" in path and self._remote(path) != [path.rstrip("/")]
        ]

    @staticmethod
    def _is_folder(path: str) -> bool:
        return "://" not in path and os.path.isdir(path) and not is_run(os.listdir(path))

    def _remote(self, address: str) -> list[str]:
        when, found = self._listed.get(address, (-math.inf, []))
        if time.monotonic() - when > _REMOTE:
            found = list(itertools.islice(_below_remote(address.rstrip("/")), _MOST))
            self._listed[address] = (time.monotonic(), found)
            if not found and when == -math.inf:
                raise RunNotFoundError(f"there is no run and no folder of runs at {address}")
        return found

    def look(self) -> list[FoundRun]:
        """Every run that is there now: those that were named, and those in the folders."""
        alone: list[str] = []
        found: list[FoundRun] = []
        for path in self._given:
            if "://" in path:
                if path not in self.stores:
                    alone.append(path)
                else:  # a name is the address below the given one
                    start = path.rstrip("/")
                    found += [FoundRun(run[len(start) + 1 :], run, Path(start)) for run in self._remote(path)]
                continue
            place = Path(path).resolve()
            if place in self.folders:
                for run in _below(place):
                    name = place.name if run == place else run.relative_to(place).as_posix()
                    found.append(FoundRun(name, str(run), None if run == place else place))
            elif place.is_dir() and is_run(os.listdir(place)):
                alone.append(path)
        named = [FoundRun(name, path, None) for name, path in zip(_short_names(alone), alone, strict=True)]
        return _told_apart([*named, *found])[:_MOST]


def _short_names(paths: Sequence[str]) -> list[str]:
    """The last folder of each path; more of it where two would be called the same."""
    parts = [path.rstrip("/").split("/") if "://" in path else Path(path).resolve().parts for path in paths]
    names = [tail[-1] for tail in parts]
    length = 2
    while len(set(names)) < len(names) and length <= max(map(len, parts), default=0):
        names = [
            "/".join(tail[-length:]) if names.count(name) > 1 else name
            for tail, name in zip(parts, names, strict=True)
        ]
        length += 1
    return names


def _told_apart(found: list[FoundRun]) -> list[FoundRun]:
    """Each run once; equal names of different runs carry the folder that they were found in."""
    once = list({run.path: run for run in found}.values())
    seen: dict[str, int] = {}
    for run in once:
        seen[run.name] = seen.get(run.name, 0) + 1
    return [
        FoundRun(f"{run.root.name}/{run.name}", run.path, run.root)
        if seen[run.name] > 1 and run.root
        else run
        for run in once
    ]


_LARGEST_NOTES = 100_000
NOTES = "notes.json"  # tags and the archived mark, beside the run's own files
_TEXT = 400
_LABELS = 60
_SPARK = 40
_LOGGED = 200
_PHASES = 8
_NUMBERS = 4_000_000  # logged numbers of a run that are read at once


def short_text(value: object, most: int = _TEXT) -> str:
    """``value`` as text that a page can hold."""
    return "" if value is None else str(value)[:most]


@final
@dataclass(slots=True)
class Card:
    """One row of the table of runs. ``known`` is False until the run was read."""

    name: str
    known: bool = False
    created: str = ""
    status: str = ""
    steps: int = 0
    first: int | None = None
    last: int | None = None
    sites: int = 0
    size: int = 0
    ranks: int = 1
    logged: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    loss: dict[str, Any] | None = None
    values: dict[str, list[float | str | None]] = field(default_factory=dict)  # last, best, least, greatest
    seconds: float | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    archived: bool = False
    findings: dict[str, int] | None = None
    problem: str | None = None  # why it cannot be read
    damage: str | None = None  # what of it cannot be read
    revision: int = 0

    def line(self) -> dict[str, object]:
        """As plain data, for JSON."""
        return {slot: getattr(self, slot) for slot in self.__slots__}


def card_of(name: str, path: str, run: Run) -> Card:
    """The card of a run that is open."""
    steps = run.steps()
    tags, archived = read_notes(path)
    logged = _logged(run)
    return Card(
        name,
        known=True,
        created=short_text(run.manifest.get("created")),
        status=run.status,
        steps=len(steps),
        first=int(steps[0]) if len(steps) else None,
        last=int(steps[-1]) if len(steps) else None,
        sites=len(run.sites()),
        size=_size(path),
        ranks=len(run.ranks),
        logged=[site for site in run.sites() if site.startswith(":value.")][:_LOGGED],
        phases=phases_of(run),
        loss=_loss(run, logged),
        values={name: _summary(name, values) for name, values in logged.items()},
        seconds=_duration(run),
        labels=_labels(run.manifest.get("labels")),
        tags=tags,
        archived=archived,
        damage=next((short_text(problem) for problem in run.problems), None),
    )


def phases_of(run: Run) -> list[str]:
    """The phases that a run has records of, training first."""
    return [short_text(phase, 40) for phase in in_order(run.phases)[:_PHASES]]


def loss_site(sites: list[str]) -> str | None:
    """The logged value that a training is judged by: ``loss`` if there is one, else one that is called so."""
    logged = [site for site in sites if site.startswith(":value.")]
    named = [site for site in logged if "loss" in site.lower()]
    return next(iter([site for site in logged if site == ":value.loss"] or named or logged), None)


_Values = npt.NDArray[np.float64]
_SMALL = re.compile(r"loss|err|ppl|perplex|nll|bpb|bpc|mse|mae|rmse|cer|wer|fid|latency", re.IGNORECASE)
_LARGE = re.compile(
    r"acc|f1|auc|bleu|rouge|score|reward|return|precision|recall|iou|dice|map$|r2", re.IGNORECASE
)


def _logged(run: Run) -> dict[str, _Values]:
    """Return the logged values by name, each in the order of steps; those of a further phase as ``loss (eval)``."""
    sites = [site for site in run.sites() if site.startswith(":value.")][:_LOGGED]
    if len(sites) * len(run.steps()) > _NUMBERS:
        return {
            _value_name(site): np.asarray(run.series(site, "value", partial=True).values) for site in sites
        }
    table = run.table(sites, ["value"], partial=True) if sites else None
    if table is None or not len(table):
        return {}
    order = np.lexsort((table.step, table.phase_codes, table.site_codes))
    keys = table.site_codes[order].astype(np.int64) * len(table.phase_names) + table.phase_codes[order]
    starts = np.flatnonzero(np.r_[True, np.diff(keys) != 0])
    found: dict[str, _Values] = {}
    usual = {site: run.phase_of(site) for site in sites} if len(run.phases) > 1 else {}
    for start, values in zip(starts, np.split(table.value[order], starts[1:]), strict=True):
        site, phase = (
            table.site_names[keys[start] // len(table.phase_names)],
            keys[start] % len(table.phase_names),
        )
        named = table.phase_names[phase]
        further = usual.get(site, named) != named
        found[_value_name(site) + (f" ({short_text(named, 40)})" if further else "")] = values
    return found


def _value_name(site: str) -> str:
    return short_text(site.removeprefix(":value."), 80)


def better(name: str) -> str | None:
    """Return "min" or "max" if the better one follows from the name of a logged value, else None."""
    return "min" if _SMALL.search(name) else "max" if _LARGE.search(name) else None


def _summary(name: str, values: _Values) -> list[float | str | None]:
    """Return the last, best, least and greatest value; the last may be NaN, the others are of the finite ones."""
    finite = values[np.isfinite(values)]
    least, greatest = (float(finite.min()), float(finite.max())) if len(finite) else (None, None)
    best = {"min": least, "max": greatest, None: None}[better(name)]
    return [_spelled(float(values[-1])), best, least, greatest]


def _spelled(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _duration(run: Run) -> float | None:
    """Return the seconds between the first and the last record."""
    times = np.asarray(run.clock()["time"], dtype=np.float64)
    return float(times.max() - times.min()) if len(times) > 1 else None


def _loss(run: Run, logged: Mapping[str, _Values]) -> dict[str, Any] | None:
    site = loss_site(run.sites())
    name = "" if site is None else _value_name(site)
    values = logged.get(name)
    if values is None:
        return None
    finite = np.where(np.isfinite(values), values, np.nan).reshape(1, -1)
    low, high, _, starts = extremes(finite, 1, _SPARK)
    middle = (low[0].astype(np.float64) + high[0]) / 2
    return {
        "name": name,
        "last": _spelled(float(values[-1])),
        "spark": [None if math.isnan(v) else float(v) for v in middle],
        "broken": bool((~np.isfinite(values)).any()),
        "points": len(starts),
    }


def _labels(labels: object) -> dict[str, object]:
    """Labels and hyperparameters as one flat row; what is no text and no number is left out."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: object, depth: int) -> None:
        if len(flat) >= _LABELS:
            return
        if isinstance(value, Mapping) and depth < 4:
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inner, depth + 1)
        elif isinstance(value, bool | str) or (isinstance(value, int | float) and math.isfinite(value)):
            flat[short_text(prefix, 80)] = value[:120] if isinstance(value, str) else value

    add("", labels, 0)
    return flat


def read_notes(path: str) -> tuple[list[str], bool]:
    """Return the tags of a run and its archived mark; empty if there are no notes."""
    try:
        # As every file of a run: no link is followed, nothing blocks, and its size is known before it is read.
        folder = folder_of(path)
        with folder.open(NOTES) as file:
            noted = load_json(file.read(0, min(file.size, _LARGEST_NOTES)))
    except (OSError, TorchtapError):
        return [], False
    if not isinstance(noted, Mapping):
        return [], False
    tags = noted.get("tags")
    listed = [short_text(tag, 60) for tag in tags[:40]] if isinstance(tags, list) else []
    return listed, noted.get("archived") is True


def _size(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def folder_signature(path: str) -> tuple[int, ...]:
    """Changes when something was added to the run or taken away; reads no file."""
    found = []
    try:
        with os.scandir(path) as listed:
            for entry in sorted(listed, key=lambda e: e.name):
                found.append(entry.stat().st_mtime_ns)
                if entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as inner:
                        found += [attempt.stat().st_mtime_ns for attempt in inner]
    except OSError:
        return (-1,)
    return tuple(found)


_OPEN = 12  # runs that stay open
_SPEND = 0.25  # seconds of one question for cards
_LOOK = 1.0  # seconds between two looks into the folders
_FINDINGS = 10_000_000  # numbers of a run that is judged for the table without being asked


@final
class CatalogEntry:
    """A run that was found, its card, and what the card was made of."""

    def __init__(self, found: FoundRun) -> None:
        self.found = found
        self.card = Card(found.name)
        self.signature: tuple[int, ...] = ()
        self.tick = 0
        self.run: Run | None = None  # kept while the run is written, and until a run that was named is opened


@final
class Catalog:
    """The runs of one viewer, and the comparison it was given, if any."""

    def __init__(
        self, shelf: Shelf, comparison: dict[str, Any] | None = None, *, rank: int | None = None
    ) -> None:
        self.shelf = shelf
        self._rank = rank  # whose recordings are shown; None for those of all ranks together
        self.comparison = comparison
        self.identity = secrets.token_hex(4)  # a page notices that it talks to another viewer
        self.tick = 1
        self._entries: dict[str, CatalogEntry] = {}
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._lock = threading.RLock()
        self._opening = threading.Lock()
        self._surveying = threading.Lock()
        self._looked = 0.0
        self._comparing = threading.Lock()
        self._compared: tuple[tuple[str, str, int, int], dict[str, Any]] | None = None
        self.look(force=True)

    @classmethod
    def open(
        cls,
        paths: Sequence[str | os.PathLike[str]],
        comparison: dict[str, Any] | None = None,
        *,
        rank: int | None = None,
    ) -> Catalog:
        """Runs and folders of runs. A run that is named has to be one; a folder may still be empty."""
        from torchtap import open as open_run

        shelf = Shelf(paths)
        catalog = cls(shelf, comparison, rank=rank)
        for entry in catalog.entries():
            if entry.found.root is None:
                # Raises at once if it is damaged.
                entry.run = open_run(entry.found.path, rank=rank, partial=True)
        return catalog

    # --- which runs there are -------------------------------------------------------------------------------

    def entries(self) -> list[CatalogEntry]:
        """Every run that is there."""
        with self._lock:
            return list(self._entries.values())

    def names(self) -> list[str]:
        """The names of the runs."""
        return [entry.found.name for entry in self.entries()]

    def look(self, *, force: bool = False) -> None:
        """Update the list of runs."""
        with self._lock:
            now = time.monotonic()
            if not force and now - self._looked < _LOOK:
                return
            found = {run.name: run for run in self.shelf.look()}
            self._looked = now
            for name in [n for n, e in self._entries.items() if found.get(n) != e.found]:
                del self._entries[name]
                self._open.pop(name, None)
                self.tick += 1
            for name, run in found.items():
                if name not in self._entries:
                    self.tick += 1
                    entry = self._entries[name] = CatalogEntry(run)
                    entry.tick = self.tick

    def survey(self) -> int:
        """Update cards for a bounded time. Return the number of cards that are still unknown."""
        self.look()
        if self._surveying.acquire(blocking=False):  # another request is updating them
            try:
                self._update_cards(time.monotonic() + _SPEND)
            finally:
                self._surveying.release()
        return sum(not entry.card.known for entry in self.entries())

    def _update_cards(self, until: float) -> None:
        # Written runs first: the page follows them.
        order = sorted(self.entries(), key=lambda e: (e.card.status != "recording", e.card.known))
        before = self.tick
        for number, entry in enumerate(order):
            self._look_at(entry)
            if number % 8 == 7 and time.monotonic() > until:
                return
        # Findings wait until all is read, and a run alone is judged when its page asks.
        for entry in order if self.tick == before and len(order) > 1 else ():
            if time.monotonic() > until:
                return
            self._judge(entry)

    def _look_at(self, entry: CatalogEntry) -> None:
        """Renew the card of a run that has changed, or may have."""
        remote = "://" in entry.found.path  # asked again after a while
        signature = (int(time.monotonic() // _REMOTE),) if remote else folder_signature(entry.found.path)
        if (entry.card.status == "recording" and not remote) or signature != entry.signature:
            self._renew(entry, signature)

    def _renew(self, entry: CatalogEntry, signature: tuple[int, ...]) -> None:
        from torchtap import open as open_run

        old, name, path = entry.card, entry.found.name, entry.found.path
        opened = self._open.get(name)
        try:
            if opened is not None:
                opened.refresh()
                with opened.lock:
                    card = card_of(name, path, opened.run)
            else:
                if entry.run is None:
                    entry.run = open_run(path, rank=self._rank, partial=True)
                else:
                    entry.run.refresh()
                card = card_of(name, path, entry.run)
        except Exception as trouble:  # a run that vanished or broke must not take the others with it
            card = Card(name, known=True, status=old.status or "closed", problem=short_text(trouble))
        if card.status != "recording" and entry.found.root is not None:
            entry.run = None
        entry.signature = signature
        card.revision, card.findings = old.revision, old.findings if old.steps == card.steps else None
        with self._lock:  # the card before its number: a page requests no card whose number it has
            changed = card.line() != old.line()
            card.revision += changed
            entry.card = card
            if changed:
                self.tick += 1
                entry.tick = self.tick

    def _judge(self, entry: CatalogEntry) -> None:
        """Count the findings of a run that has ended, once, where that is quick."""
        if not self.may_judge(entry):
            return
        try:
            self.note_findings(entry.found.name, self._findings(entry))
        except Exception as trouble:
            entry.card.problem = short_text(trouble)

    @staticmethod
    def may_judge(entry: CatalogEntry) -> bool:
        """Return True if the run has ended, is not judged yet, and is small enough to judge without a request."""
        card = entry.card
        quick = card.steps * card.sites * 14 < _FINDINGS
        return (
            card.known and card.findings is None and card.status != "recording" and not card.problem and quick
        )

    def _findings(self, entry: CatalogEntry) -> list[Any]:
        from torchtap import open as open_run
        from torchtap.diagnosis.diagnose import diagnose

        opened = self._open.get(entry.found.name)
        return (
            opened.findings()
            if opened is not None
            else diagnose(open_run(entry.found.path, rank=self._rank, partial=True))
        )

    def note_findings(self, name: str, found: Sequence[Any]) -> None:
        """Keep how many findings a run has, for the table."""
        entry = self._entries.get(name)
        if entry is None:
            return
        errors = sum(finding.severity == "error" for finding in found)
        warnings = sum(finding.severity == "warning" for finding in found)
        judged = getattr(found, "verdict", "") != "not judged"
        counted = {"errors": errors, "warnings": warnings, "judged": judged}
        if entry.card.findings != counted:
            with self._lock:
                entry.card.findings = counted
                self.tick += 1
                entry.tick = self.tick

    # --- one run --------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> OpenRun:
        from torchtap import open as open_run

        with self._opening:
            entry = self._entry(name)
            if entry is None:
                self.look(force=True)
                entry = self._entry(name)
            if entry is None:
                raise Refused(f"there is no run called {name[:200]!r} here; it may have been deleted", 404)
            name = entry.found.name
            opened = self._open.get(name)
            if opened is None:
                run = self._take(entry) or open_run(entry.found.path, rank=self._rank, partial=True)
                opened = self._open[name] = OpenRun(run, name)
                while len(self._open) > _OPEN:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(name)
            return opened

    def _take(self, entry: CatalogEntry) -> Run | None:
        """The run behind a card, unless a card is being made of it right now; opening it again takes a while."""
        if not self._surveying.acquire(blocking=False):
            return None
        try:
            run, entry.run = entry.run, None
            return run
        finally:
            self._surveying.release()

    def _entry(self, name: str) -> CatalogEntry | None:
        """The run that the page means: nothing is the first, and some names reach it spelled out."""
        if not name:
            return next(iter(self._entries.values()), None)
        found = self._entries.get(name)
        return found or next((e for n, e in self._entries.items() if browser_text(n) == name), None)

    def place(self, name: str) -> FoundRun:
        """Return the location of a run."""
        self.look(force=True)
        entry = self._entry(name)
        if entry is None:
            raise Refused(f"there is no run called {name[:200]!r} here; it may have been deleted", 404)
        return entry.found

    def vanished(self, name: str) -> bool:
        """Return True if the folder of a run on this machine is no longer a run."""
        entry = self._entry(name)
        path = "" if entry is None else entry.found.path
        return "://" not in path and not any(_below(Path(path), _DEPTH))

    def forget(self, name: str) -> None:
        """Close a run whose folder was moved or deleted, and look again."""
        with self._lock:
            self._open.pop(name, None)
            entry = self._entries.get(name)
            if entry is not None:
                entry.signature = ()
        self.look(force=True)

    def compare(self, first: str, second: str) -> dict[str, Any]:
        """Compare the present state of two runs. The last result is cached, because a comparison reads everything."""
        from torchtap import open as open_run
        from torchtap.comparison.recorded import compare_stored
        from torchtap.comparison.result import plain

        a, b = self[first], self[second]
        with self._comparing:
            key = (first, second, a.revision, b.revision)
            if self._compared is None or self._compared[0] != key:
                # Opens both again: a comparison takes seconds, and the page sends other requests meanwhile.
                result = compare_stored(
                    open_run(a.run.path, rank=self._rank), open_run(b.run.path, rank=self._rank)
                )
                self._compared = (key, plain(result.as_dict()))
            return self._compared[1]
