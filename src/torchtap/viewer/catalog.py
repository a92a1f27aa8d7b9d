"""The runs of one viewer, by name: found as they appear, opened when somebody asks, and their cards for the table.

Guarantees:
- a run is opened only when it is asked about, and only a few stay open;
- one question spends a bounded time on cards, so a thousand runs show their names at once and fill in;
- a run that vanished is told, never shown as an empty one.

Not here: what is read of one run (`opened`), where runs are (`shelf`), who may ask (`security`).
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from torchtap.sanitize import browser_text
from torchtap.viewer.cards import Card, card_of, folder_signature, short_text
from torchtap.viewer.opened import OpenRun, Refused
from torchtap.viewer.shelf import FoundRun, Shelf

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = ["Catalog"]

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
        from torchtap.store.read.reader import open_run

        shelf = Shelf(paths)
        catalog = cls(shelf, comparison, rank=rank)
        for entry in catalog.entries():
            if entry.found.root is None:
                entry.run = open_run(
                    entry.found.path, rank=rank, partial=True
                )  # says at once what is wrong with it
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
        """Notice runs that came and went."""
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
        """Bring cards up to date for a bounded time; says how many are still unknown."""
        self.look()
        if self._surveying.acquire(blocking=False):  # somebody else's question is at it already
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
        """Renew a card whose run has changed, or of which nobody can tell whether it has."""
        signature = folder_signature(entry.found.path)
        if entry.card.status == "recording" or signature != entry.signature or "://" in entry.found.path:
            self._renew(entry, signature)

    def _renew(self, entry: CatalogEntry, signature: tuple[int, ...]) -> None:
        from torchtap.store.read.reader import open_run

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
        if card.line() != old.line():
            with self._lock:
                self.tick += 1
                card.revision += 1
                entry.tick = self.tick
        entry.card = card

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
        """Whether the run has ended, is not judged yet, and small enough to be judged without being asked for."""
        card = entry.card
        quick = card.steps * card.sites * 14 < _FINDINGS
        return (
            card.known and card.findings is None and card.status != "recording" and not card.problem and quick
        )

    def _findings(self, entry: CatalogEntry) -> list[Any]:
        from torchtap.diagnosis.run import diagnose
        from torchtap.store.read.reader import open_run

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
        counted = {"errors": errors, "warnings": sum(finding.severity == "warning" for finding in found)}
        if entry.card.findings != counted:
            with self._lock:
                self.tick += 1
                entry.tick = self.tick
                entry.card.findings = counted

    # --- one run --------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> OpenRun:
        from torchtap.store.read.reader import open_run

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
        """Where a run is."""
        self.look(force=True)
        entry = self._entry(name)
        if entry is None:
            raise Refused(f"there is no run called {name[:200]!r} here; it may have been deleted", 404)
        return entry.found

    def forget(self, name: str) -> None:
        """Close a run whose folder was moved or deleted, and look again."""
        with self._lock:
            self._open.pop(name, None)
            entry = self._entries.get(name)
            if entry is not None:
                entry.signature = ()
        self.look(force=True)

    def compare(self, first: str, second: str) -> dict[str, Any]:
        """The comparison of two of the runs as they are now; the last one is kept, since it reads everything."""
        from torchtap.comparison.recorded import compare_stored
        from torchtap.comparison.result import plain
        from torchtap.store.read.reader import open_run

        a, b = self[first], self[second]
        with self._comparing:
            key = (first, second, a.revision, b.revision)
            if self._compared is None or self._compared[0] != key:
                # Opened anew: a comparison takes seconds, and the page goes on asking meanwhile.
                result = compare_stored(
                    open_run(a.run.path, rank=self._rank), open_run(b.run.path, rank=self._rank)
                )
                self._compared = (key, plain(result.as_dict()))
            return self._compared[1]
