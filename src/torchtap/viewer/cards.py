"""One run in a line of the table: how far it came, its last loss, its labels, what was found.

A card is made from the little that has to be read for it. Everything here comes from files that somebody else may
have written: texts are cut to a length and labels to a number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from torchtap.errors import TorchtapError
from torchtap.store.files.folder import LocalFolder
from torchtap.store.format.checksum import load_json
from torchtap.store.read.lookup import in_order
from torchtap.viewer.downsample import extremes

if TYPE_CHECKING:
    from torchtap.store.read.reader import Run

__all__ = [
    "NOTES",
    "Card",
    "card_of",
    "folder_signature",
    "loss_site",
    "phases_of",
    "read_notes",
    "short_text",
]

_LARGEST_NOTES = 100_000
NOTES = "notes.json"  # tags and the archived mark, beside the run's own files
_TEXT = 400
_LABELS = 60
_SPARK = 40
_LOGGED = 200
_PHASES = 8


def short_text(value: object, most: int = _TEXT) -> str:
    """``value`` as text that a page can hold."""
    return "" if value is None else str(value)[:most]


@final
@dataclass(slots=True)
class Card:
    """What the table says of a run. ``known`` is false until the run was looked at."""

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
        loss=_loss(run),
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


def _loss(run: Run) -> dict[str, Any] | None:
    site = loss_site(run.sites())
    if site is None or "value" not in run.statistics(site):
        return None
    values = np.asarray(run.series(site, "value").values, dtype=np.float64)
    if not len(values):
        return None
    finite = np.where(np.isfinite(values), values, np.nan).reshape(1, -1)
    low, high, _, starts = extremes(finite, 1, _SPARK)
    middle = (low[0].astype(np.float64) + high[0]) / 2
    return {
        "name": site.removeprefix(":value."),
        "last": float(values[-1]) if math.isfinite(values[-1]) else str(values[-1]),
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
    """The tags of a run, and whether it was put away; nothing where nobody noted anything."""
    try:
        # As every file of a run: no link is followed, nothing blocks, and its size is known before it is read.
        with LocalFolder(path).open(NOTES) as file:
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
